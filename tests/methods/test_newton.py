"""recipe=newton: sweeps over all positions at once that become backpropagation through time."""

from __future__ import annotations

import pytest
import torch
from conftest import engine_of
from test_through_time import CELL_NAMES, B, H, batch, run_whole, share_of, time_network
from torch import Tensor
from torch.nn import functional as F

from treeprop_ray import config, data, methods
from treeprop_ray.benchmarks import rehearsal
from treeprop_ray.core.bptt import unrolled
from treeprop_ray.core.cells import Cell
from treeprop_ray.core.scan import scan
from treeprop_ray.core.time_tree import TimeRule
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.time import WholeTreeHost
from treeprop_ray.models.rnn import TimeNetwork
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.ops import STEP

D = 3


def newton_gradients(
    network: TimeNetwork, K: int, damping: float = 0.0
) -> tuple[dict[str, Tensor], float]:
    """Gradients of the deployed cell, and how far its states were from their own successors."""
    rule = TimeRule(network.depth, K, newton=True, damping=damping)
    host = WholeTreeHost(share_of(network), rule)
    run_whole(host)
    grads = {k: p.grad for k, p in network.parts()["f0"].named_parameters() if p.grad is not None}
    return grads, float(host.report(0, norms=False).losses[0]["cons"])


def by_definition(network: TimeNetwork, K: int, damping: float) -> dict[str, Tensor]:
    """The formulas of core/newton.py position by position, Jacobians and gradients by autograd."""
    (x, y), f0, N = batch(D), network.parts()["f0"], 2**D
    h = {0: x.new_zeros(B, H)}
    for d in reversed(range(1, D)):
        for n in range(2**d, N, 2 ** (d + 1)):
            h[n] = network.parts()[f"f{d}"](x[:, n - 2**d : n].flatten(1), h[n - 2**d]).detach()
    for t in range(1, N, 2):
        h[t] = f0(x[:, t - 1], h[t - 1]).detach()

    def jacobian(t: int, state: Tensor) -> Tensor:
        """(B, out, in) of the step to h_t."""
        of = torch.autograd.functional.jacobian(lambda s: f0(x[:, t - 1], s).sum(0), state)
        return of.permute(1, 0, 2)  # type: ignore[union-attr]

    def diagonal(J: Tensor) -> Tensor:
        return J.diagonal(0, 1, 2).clamp(-1, 1) * (1 - damping)

    for _ in range(K):
        found = {0: h[0]}
        for t in range(1, N + 1):
            a = diagonal(jacobian(t, h[t - 1]))
            found[t] = (f0(x[:, t - 1], h[t - 1]) + a * (found[t - 1] - h[t - 1])).detach()
        h = found
    steps = {t: f0(x[:, t - 1], h[t - 1]) for t in range(1, N + 1)}
    J = {t: jacobian(t, h[t - 1]) for t in range(1, N + 1)}
    at = steps[N].detach().requires_grad_()
    (label,) = torch.autograd.grad(F.cross_entropy(network.parts()["readout"](at), y), at)
    last: dict[int, Tensor] = {}
    for _ in range(K + 1):
        slope = {N: label}
        for t in range(N, 1, -1):
            a = diagonal(J[t])
            slope[t - 1] = a * slope[t]
            if last:
                slope[t - 1] += torch.einsum("boi,bo->bi", J[t], last[t]) - a * last[t]
        last = slope
    surrogate = sum((steps[t] * last[t]).sum() for t in steps)
    names, values = zip(*f0.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(surrogate, values), strict=True))


def test_a_scan_is_the_recurrence_step_by_step() -> None:
    a, b = torch.rand(2, 3, 11, 4, dtype=torch.float64).unbind(0)
    h, found = torch.zeros(3, 4, dtype=torch.float64), scan(a, b)
    for t in range(11):
        h = a[:, t] * h + b[:, t]
        assert torch.allclose(found[:, t], h)


@pytest.mark.parametrize("kind", CELL_NAMES)
def test_the_diagonal_is_that_of_the_jacobian(kind: str) -> None:
    cell: Cell = time_network(kind, 1).parts()["f0"]  # type: ignore[assignment]
    x, h = batch(1)[0][:, 0], torch.rand(B, H, dtype=torch.float64)
    kept = cell.room(1, B, h)
    with torch.no_grad():
        cell.trace(cell.project(x), h, kept, 0)
        found = cell.diagonal(cell.factors(kept), kept, 0)
    for i in range(B):
        J = torch.autograd.functional.jacobian(lambda s, i=i: cell(x[i], s), h[i])  # type: ignore
        assert torch.allclose(found[i], J.diagonal())


@pytest.mark.parametrize("kind", CELL_NAMES)
@pytest.mark.parametrize(("K", "damping"), [(0, 0.0), (1, 0.0), (2, 0.3), (3, 1.0)])
def test_gradients_are_those_of_the_formula(kind: str, K: int, damping: float) -> None:
    network = time_network(kind, D)
    expected = by_definition(network, K, damping)
    found, _ = newton_gradients(network, K, damping)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[k], v, atol=1e-12) for k, v in expected.items())


@pytest.mark.parametrize("kind", CELL_NAMES)
def test_enough_sweeps_are_backpropagation_through_time(kind: str) -> None:
    network, (x, y) = time_network(kind, D), batch(D)
    f0 = network.parts()["f0"]
    logits = network.parts()["readout"](unrolled(f0)(x))  # type: ignore[arg-type]
    names, values = zip(*f0.named_parameters(), strict=True)
    exact = torch.autograd.grad(F.cross_entropy(logits, y), values)
    pairs = list(zip(names, exact, strict=True))
    apart = []
    for K in (0, 1, 2, 4, 2**D):
        for p in network.parameters():
            p.grad = None
        found, _ = newton_gradients(network, K)
        apart.append(max(float((found[k] - v).abs().max()) for k, v in pairs))
    assert apart[-1] < 1e-12
    assert apart == sorted(apart, reverse=True)


@pytest.mark.parametrize("kind", CELL_NAMES)
def test_sweeps_converge_to_the_deployed_states(kind: str) -> None:
    """And Newton's faster than plain ones."""
    network = time_network(kind, 5)
    fast, plain = ([newton_gradients(network, K, a)[1] for K in (1, 2, 3)] for a in (0.0, 1.0))
    assert fast == sorted(fast, reverse=True)
    assert all(a < b for a, b in zip(fast, plain, strict=True))
    assert newton_gradients(network, 32)[1] < 1e-24


def test_hosts_apart_are_bitwise_one_process() -> None:
    words = ["experiment=digits_gru", "model.hidden=8", "time.depth=3", "time.recipe=newton",
             "time.sweeps=2", "batch=16", "clip=0.1"]  # fmt: skip
    settings = config.load(words)
    engine = engine_of(settings, data.load(settings), 3)
    job = methods.job_of(settings, data.load(settings), 3)
    plan = job.method.plan(settings, job.tree, Cluster(((8.0, 0.0),)))
    hosts = [job.method.host(job, plan, index) for index in range(len(plan.names))]
    assert len(hosts) == 4
    for step in range(3):
        engine.step(step, report=False)
        rehearsal.step(hosts, job, {STEP: job.method.calls(job, plan)}[STEP], step)
    weights = {k: v for host in hosts for k, v in host.state()[0].items()}
    assert all(torch.equal(weights[k], v) for k, v in engine.state()[0].items())


@pytest.mark.parametrize(
    "words",
    [
        ["time.recipe=newton", "time.shards=2"],
        ["time.recipe=newton", "time.lambda_cons=2"],
        ["time.recipe=paper", "time.damping=0.5"],
    ],
)
def test_what_newton_has_not_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match=words[1].split("=")[0]):
        methods.checked(config.load(["experiment=digits_gru", *words]))
