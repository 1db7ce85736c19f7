"""minGRU by a scan: a recurrent baseline of logarithmic span."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from treeprop_ray import config, methods
from treeprop_ray.core.bptt import cell_by_cell, scanned
from treeprop_ray.core.mingru import MinGRUCell
from treeprop_ray.errors import UserError
from treeprop_ray.run.trainer import Trainer

SMALL = [
    "experiment=digits_gru",
    "model.name=mingru",
    "model.hidden=8",
    "time.depth=3",
    "time.sweeps=0",
]


def test_a_scan_is_the_loop_with_its_gradients() -> None:
    torch.manual_seed(1)
    cell = MinGRUCell(3, 5).double()
    x, weights = torch.randn(4, 13, 3, dtype=torch.float64), list(cell.parameters())
    found = [roll(cell)(x) for roll in (scanned, cell_by_cell)]
    assert torch.allclose(*found)
    slopes = [torch.autograd.grad(F.mse_loss(h, torch.ones_like(h)), weights) for h in found]
    assert all(torch.allclose(a, b) for a, b in zip(*slopes, strict=True))


def test_a_run_learns_and_is_scored_step_by_step(tmp_path: Path) -> None:
    words = [*SMALL, "method=bptt", "epochs=4", "lr=0.02", f"out={tmp_path}"]
    summary = Trainer.of(config.load(words)).train()
    assert summary["final"]["test"]["full"]["accuracy"] > 0.5
    assert summary["parameters_deployed"] == 2 * 8 * (8 + 1) + 10 * 9


def test_the_tree_has_no_such_cell() -> None:
    with pytest.raises(UserError, match="mingru: has no tree over time"):
        methods.checked(config.load(SMALL))
    with pytest.raises(UserError, match="no fused mingru"):
        methods.checked(config.load([*SMALL, "method=bptt_fused"]))
