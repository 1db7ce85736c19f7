"""recipe=lookahead: the deployed cell on its own states, the coarser cells on its way to labels."""

from __future__ import annotations

import pytest
import torch
from test_through_time import (
    CELL_NAMES,
    B,
    H,
    batch,
    loss_node_by_node,
    run_whole,
    share_of,
    time_network,
)
from torch import Tensor
from torch.nn import functional as F

from treeprop_ray.core.jumps import jumps, window_of
from treeprop_ray.core.time_tree import TimeRule
from treeprop_ray.hosts.time import WholeTreeHost
from treeprop_ray.models.rnn import TimeNetwork


def gradients(network: TimeNetwork, pieces: int) -> dict[str, Tensor]:
    host = WholeTreeHost(share_of(network), TimeRule(network.depth, lookahead=True))
    network.zero_grad()
    run_whole(host, pieces)
    return {k: p.grad.clone() for k, p in network.named_parameters() if p.grad is not None}


def loss_by_definition(network: TimeNetwork, x: Tensor, y: Tensor) -> Tensor:
    """Without the tree: window by window, jump by jump, left to autograd."""
    D, N, parts = network.depth, 2**network.depth, network.parts()
    W, h, ends = window_of(D), x.new_zeros(B, H), {}
    total = x.new_zeros(())
    for t in range(N):
        h = parts["f0"](x[:, t], h if t % W else h.detach())
        if (t + 1) % W == 0:
            ends[t + 1] = h
    for end, h in ends.items():
        t = end
        while t < N:
            d = (t & -t).bit_length() - 1
            h = parts[f"f{d}"](x[:, t : t + 2**d].flatten(1), h)
            t += 2**d
        total = total + F.cross_entropy(parts["readout"](h), y)
    return total


@pytest.mark.parametrize("kind", CELL_NAMES)
@pytest.mark.parametrize("D", [1, 3, 5])
def test_its_gradient_is_that_of_the_stated_objective(kind: str, D: int) -> None:
    network, (x, y) = time_network(kind, D), batch(D)
    network.zero_grad()
    (loss_by_definition(network, x, y) + loss_node_by_node(network, x, y, finest=1)).backward()
    expected = {k: p.grad.clone() for k, p in network.named_parameters() if p.grad is not None}
    for pieces in (1, 2):
        found = gradients(network, pieces)
        assert found.keys() == expected.keys()
        for k, grad in found.items():
            torch.testing.assert_close(grad, expected[k], msg=f"{pieces}: {k}")


@pytest.mark.parametrize("D", range(1, 11))
def test_every_window_reaches_the_end_over_distinct_depths(D: int) -> None:
    W, N = window_of(D), 2**D
    assert N % W == 0 and 2 <= W <= max(2, min(4 * D, N // 2)) < 2 * W  # the largest there is
    at = {j: (j + 1) * W for j in range(N // W)}
    for d, moved in jumps(D, W).items():
        for j, t in moved:
            assert at[j] == t and t % 2**d == 0
            at[j] += 2**d
    assert set(at.values()) == {N}
