"""What every host promises: what it holds and forgets, what it reports, what waits for later."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import cut
from treeprop_ray.errors import TrainingError
from treeprop_ray.hosts.base import Held, Host, Share, there
from treeprop_ray.schedule.ops import Call, Op

PIECE = cut(0, 4, 1)[0]


class Linear(Host):
    """One part; `ahead` runs it, `back` goes back through it."""

    def __init__(self, loss: float = 1.0) -> None:
        torch.manual_seed(0)
        super().__init__(Share({"a": nn.Linear(2, 2)}, OptimizerRule(kind="sgd", lr=0.1)))
        self.loss = loss
        self.verbs = {"ahead": self._ahead, "back": self._back}

    def where(self, place: int) -> str:
        return f"place {place}"

    def _ahead(self, op: Op, held: Held, piece: Any) -> None:
        self.leaf = there(held, "x").detach().requires_grad_()
        held["z"] = self.run_block(self.parts["a"], self.leaf, 0)

    def _back(self, op: Op, held: Held, piece: Any) -> None:
        z = there(held, "z")
        self.go_back(z, torch.ones_like(z), self.leaf)
        self.note(7, "ce", torch.tensor(self.loss))
        held["g"] = self.leaf.grad


def call(verb: str, packets: tuple[tuple[str, ...], ...] = (), last: bool = False) -> Call:
    return Call("forward", 1, 0, 0, (Op(verb, 7),), ("x",), packets, last)


def test_a_host_keeps_a_piece_until_its_last_call() -> None:
    host = Linear()
    x = {"x": torch.ones(4, 2)}
    assert host.run(call("ahead"), PIECE, x) == {} and set(host.held[0]) == {"x", "z"}
    out = host.run(call("back", (("g",),), last=True), PIECE, {})
    assert set(out) == {"g"} and not host.held


def test_gradients_of_weights_wait_while_others_wait_for_the_call() -> None:
    """Both ways give the same bits; only the time differs."""
    grads = []
    for packets in ((), (("g",),)):
        host = Linear()
        host.run(call("ahead"), PIECE, {"x": torch.ones(4, 2)})
        host.run(call("back", packets, last=True), PIECE, {})
        assert (host.parts["a"].weight.grad is None) == bool(packets)
        host.report(0, norms=True)
        grads.append(host.parts["a"].weight.grad)
    assert torch.equal(grads[0], grads[1])


def test_a_report_empties_the_losses_and_a_bad_one_names_its_place() -> None:
    host = Linear()
    host.note(7, "ce", torch.tensor(1.0))
    host.note(7, "ce", torch.tensor(2.0))
    assert host.report(3, norms=False).losses == {7: {"ce": 3.0}}
    assert host.report(3, norms=False).losses == {}
    host.note(7, "ce", torch.tensor(math.inf))
    with pytest.raises(TrainingError, match="loss ce=inf at place 7, step 4"):
        host.report(4, norms=False)
    host.parts["a"].weight.grad = torch.full((2, 2), math.nan)
    with pytest.raises(TrainingError, match="gradient of a is nan, step 5"):
        host.report(5, norms=True)


def test_a_state_is_taken_up_whole_and_forgets_the_step_under_way() -> None:
    host, other = Linear(), Linear()
    host.run(call("ahead"), PIECE, {"x": torch.ones(4, 2)})
    host.run(call("back"), PIECE, {})
    host.apply(0, None)
    other.run(call("ahead"), PIECE, {"x": torch.ones(4, 2)})
    other.note(7, "ce", torch.tensor(9.0))
    other.load(*host.state())
    assert not other.held and other.report(0, norms=False).losses == {}
    for a, b in zip(host.state(), other.state(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_dropout_depends_on_the_seed_alone() -> None:
    host, drop = Linear(), nn.Dropout(0.5)
    x = torch.ones(64)
    first = host.run_block(drop, x, 5)
    torch.rand(3)
    assert torch.equal(first, host.run_block(drop, x, 5))
    assert not torch.equal(first, host.run_block(drop, x, 6))
