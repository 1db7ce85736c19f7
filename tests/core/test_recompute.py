"""recompute=true for trees: less is kept, and not a bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import engine_of
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from treeprop_ray import TreeNetwork, config, data, fit, methods
from treeprop_ray.errors import UserError

GPT = ["experiment=text_small", "model.blocks=5", "model.hidden=8", "model.heads=2",
       "data.length=8", "data.limit=64", "batch=6", "microbatches=2", "model.dropout=0.3",
       "beta=0.5", "alpha=0.5", "objective=node_all_ce"]  # fmt: skip
MLP = ["model.hidden=8", "batch=32", "model.activation=tanh", "beta=0.5", "correction=vjp"]


@pytest.mark.parametrize("words", [GPT, MLP], ids=["dropout", "two backwards"])
def test_not_a_bit_changes(words: list[str]) -> None:
    states = []
    for recompute in ("false", "true"):
        settings = config.load([*words, f"recompute={recompute}"])
        engine = engine_of(settings, data.load(settings), 4)
        for step in range(3):
            engine.step(step, report=True)
        states.append(engine.state())
    for mine, theirs in zip(*states, strict=True):
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())


class Normed(nn.Module):
    """With buffers that every run changes, and whose values the next one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z + torch.tanh(self.norm(self.linear(z)))


@pytest.mark.parametrize(
    "more",
    [{}, {"method": "bp"}, {"finish": 0.5, "finish_sweeps": 2}],  # the last goes back in two steps
    ids=["tree", "bp", "sweeps"],
)
def test_buffers_that_a_run_changes_are_those_of_one_run(more: dict[str, Any]) -> None:
    x, y = torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3
    states = []
    for recompute in (False, True):
        torch.manual_seed(0)
        blocks = [Normed() for _ in range(3)]
        network = TreeNetwork.from_blocks(
            None, blocks, nn.Linear(6, 3), example=x[:2], auxiliary=lambda l, r: Normed()
        )
        words = {"recompute": recompute, "microbatches": 2, "batch": 16, **more}
        states.append(fit(network, x, y, epochs=2, **words).network.state_dict())
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


def saved_bytes(words: list[str]) -> int:
    """Of what graphs keep in a step, less weights and what is kept twice."""
    settings = config.load(words)
    engine = engine_of(settings, data.load(settings), 4)
    kept = 0

    def pack(t: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += t.numel() * t.element_size()
        return t

    for node in engine.host.nodes.values():
        if node.node.l > 0 and not node.node.is_leaf:
            z = torch.randn(32, 8)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                node.lifts(node.left, z.requires_grad_(), 0)
    return kept


def test_a_node_with_children_keeps_its_input_only() -> None:
    plain = saved_bytes([*MLP, "recompute=false"])
    assert saved_bytes([*MLP, "recompute=true"]) < plain


@pytest.mark.parametrize("words", [["experiment=digits_gru"], ["method=cff"]])
def test_where_nothing_waits_it_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="recompute=true: is for method=tree and bp over blocks"):
        methods.checked(config.load([*words, "recompute=true"]))
