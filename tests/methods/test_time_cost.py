"""What a step through time costs: work is what a host does, the critical path as DESIGN has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Result
from torch import Tensor, nn

from treeprop_ray import config, data
from treeprop_ray.core.cells import GRUCell, Kept
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import cut
from treeprop_ray.hosts.base import Share
from treeprop_ray.hosts.time import TimeHost, WholeTreeHost
from treeprop_ray.methods.tree_time import time_rule
from treeprop_ray.schedule.cost import Cost
from treeprop_ray.schedule.time import whole_step
from treeprop_ray.schedule.time_cost import bptt_cost, time_tree_cost

Command = Callable[..., Result]
B, S, H, C = 2, 1, 3, 4


class Counting(GRUCell):
    """Counts the rows of its applications, ahead and back."""

    ahead = back = 0

    def trace(self, p: Tensor, h: Tensor, kept: Kept, side: int) -> Tensor:
        self.ahead += len(h)
        return super().trace(p, h, kept, side)

    def slopes(self, *given: Any, state: bool = False) -> Tensor | None:
        self.back += len(given[3]) if state and self.keeps else 0
        return super().slopes(*given, state=state)

    def add_gradients(self, x: Tensor, h: Tensor, d: Tensor) -> None:
        self.back += len(x)
        super().add_gradients(x, h, d)

    keeps = False  # whether a slope at the state before is found again and again: newton


@pytest.mark.parametrize("words", [
    ["time.sweeps=0"], ["time.sweeps=1"], ["time.sweeps=3"], ["time.recipe=boost"],
    ["time.recipe=lookahead", "time.sweeps=0"], ["time.recipe=newton", "time.sweeps=0"],
    ["time.recipe=newton", "time.sweeps=3"],
])  # fmt: skip
@pytest.mark.parametrize("D", [1, 2, 4])
def test_the_work_is_what_a_host_does(D: int, words: list[str]) -> None:
    settings = config.load(["experiment=digits_gru", f"time.depth={D}", *words])
    cells = {f"f{d}": Counting(2**d * S, H) for d in range(D)}
    cells["f0"].keeps = settings.time.recipe == "newton"
    parts: dict[str, nn.Module] = {**cells, "readout": nn.Linear(H, C)}
    split = data.Split(torch.randn(B, 2**D, S), torch.arange(B) % C)
    batches = data.Batches(data.DataSet("", split, split, split, C, lambda x: x), B, 1)
    host: TimeHost = WholeTreeHost(Share(parts, OptimizerRule(), batches), time_rule(settings))
    (call,), (piece,) = whole_step(1), cut(0, B, 1)
    host.run(call, piece, {})
    done = sum(cell.ahead + cell.back for cell in cells.values())
    assert done == B * time_tree_cost(settings.time).work


def cost(*words: str) -> Cost:
    return time_tree_cost(config.load(["experiment=digits_gru", *words]).time)


@pytest.mark.parametrize(("D", "ratio"), [(6, 9.8), (8, 30.1)])
def test_the_ideal_span_is_that_of_the_design(D: int, ratio: float) -> None:
    """2 N / (1 + D + K) with K = D."""
    path = cost(f"time.depth={D}", f"time.sweeps={D}").path
    assert path == 1 + D + D and bptt_cost(D).path / path == pytest.approx(ratio, abs=0.06)


def test_who_grows_with_the_logarithm_and_who_with_the_length() -> None:
    spans = {
        "paper": [cost(f"time.depth={D}", "time.sweeps=4").path for D in (6, 8)],
        "newton": [
            cost(f"time.depth={D}", "time.recipe=newton", "time.sweeps=4").path for D in (6, 8)
        ],
        "lookahead": [
            cost(f"time.depth={D}", "time.recipe=lookahead", "time.sweeps=0").path for D in (6, 8)
        ],
        "bptt": [bptt_cost(D).path for D in (6, 8)],
        "scan": [bptt_cost(D, scans=True).path for D in (6, 8)],
    }
    assert spans == {
        "paper": [11, 13], "newton": [70, 90], "lookahead": [64 + 16 + 4, 256 + 32 + 6],
        "bptt": [128, 512], "scan": [14, 18],
    }  # fmt: skip
    assert cost("time.sweeps=0").path == 4 + 3
    assert cost("time.sweeps=0", "time.gradient=one").path == 4 + 2
    assert math.isclose(cost("time.sweeps=0", "time.gradient=one").work, 3 * 15)


@pytest.mark.parametrize(("words", "told"), [
    ([], "work 124 (backpropagation 32), critical path 9 (28 % of 32)"),
    (["method=bptt"], "work 32 (backpropagation 32), critical path 32 (100 % of 32)"),
    (["method=bptt", "model.name=mingru"], "critical path 10 (31 % of 32)"),
    (["model.name=own_cells:gated", "model.recurrent=true"], "critical path 9 (28 % of 32)"),
])  # fmt: skip
def test_cfg_shows_it(words: list[str], told: str, command: Command) -> None:
    shown = command("train", "--cfg", "experiment=digits_gru", *words)
    assert shown.code == 0 and told in shown.out
