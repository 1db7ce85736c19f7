"""What a step costs: bytes that live, block applications, the longest line, bytes moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Result
from torch import nn

from treeprop_ray.benchmarks import accounting
from treeprop_ray.benchmarks.memory import Meter
from treeprop_ray.benchmarks.rehearsal import account
from treeprop_ray.benchmarks.step_ray import BASE

TINY = [*BASE, "model.hidden=24", "batch=8"]
STATE = 8 * 64 * 24 * 4  # bytes of a state: batch, tokens, width, float32


def test_the_meter_counts_living_tensors_and_no_views() -> None:
    layer, x = nn.Linear(100, 50, bias=False), torch.randn(20, 100)
    with Meter() as meter:
        with meter.charge("a"):
            y = layer(x)
            y.view(-1)
            assert meter.live["a"] == 20 * 50 * 4
        with meter.charge("b"):
            y.sum().backward()
            assert layer.weight.grad is not None
            assert meter.live["b"] >= 100 * 50 * 4
        layer.weight.grad = None
        del y
        assert meter.live["a"] == meter.live["b"] == 0
    assert meter.flops >= 2 * 20 * 100 * 50


def test_backpropagation_and_its_pipeline() -> None:
    one, cut = account([*TINY, "method=bp"], 1), account([*TINY, "method=bp", "microbatches=4"], 4)
    assert one.work == one.span == cut.work == 16 and one.moved == 0
    assert cut.span == 2 * (4 + 4 - 1) * 2 / 4
    labels = 8 * 8 + 4 * 4  # and how many of them count, with every piece
    assert cut.moved == 6 * STATE + labels  # a state and its adjoint over each of three borders
    assert one.trained == one.deployed == cut.deployed and one.gflop == pytest.approx(cut.gflop)
    assert account([*TINY, "method=bp", "recompute=true"], 1).peak < one.peak / 2


def test_layers_that_learn_alone_send_two_views_and_nothing_back() -> None:
    found = account([*TINY, "method=cff"], 4)
    assert found.work == 4 * 7 and found.trained == found.deployed
    assert found.moved == 3 * 2 * STATE + 2 * 8 * 8


def test_the_tree_trades_parameters_and_work_for_a_short_line() -> None:
    chain, tree = account([*TINY, "method=bp"], 1), account([*TINY, "alpha=1", "beta=0"], 4)
    assert tree.deployed == chain.deployed < tree.trained
    assert tree.work == 2 * 12 and tree.span < chain.span
    assert tree.peak < chain.peak


def test_the_table_replaces_itself_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{accounting.BEGIN}\nold\n{accounting.END}\nafter\n")
    for value in (1, 2):
        assert accounting.put_into(page, [{"N": value}])
    assert page.read_text().count(accounting.BEGIN) == 1 and "old" not in page.read_text()
    assert "| 2 " in page.read_text() and page.read_text().endswith("after\n")
    assert not accounting.put_into(tmp_path / "absent.md", [])


def test_the_mnist_table_is_read_from_runs(command: Callable[..., Result], tmp_path: Path) -> None:
    empty = command("bench", "baselines", f"runs={tmp_path}", f"out={tmp_path}")
    assert empty.code == 2 and "runs=" in empty.err
    run = tmp_path / "mnist_x"
    run.mkdir()
    (run / "config.yaml").write_text(
        "method: cff\nmodel: {blocks: 7, hidden: 100}\ndata: {name: mnist}\nepochs: 10\n"
    )
    scores = {split: {"full": {"accuracy": 0.5, "loss": 1.0}} for split in ("test", "validation")}
    facts = {
        "N": 8, "epochs": 10.0, "final": scores, "parameters_trained": 7, "parameters_deployed": 7,
        "block_applications_per_step": 14, "samples_seen": 1, "wall_seconds": 2.0, "command": "c",
    }  # fmt: skip
    (run / "summary.json").write_text(json.dumps(facts))
    result = command("bench", "baselines", f"runs={tmp_path}", f"out={tmp_path}")
    assert result.code == 0 and "50.00" in result.out and result.out.count("not run") == 8
    assert (tmp_path / "baselines_mnist" / "mnist_x.json").is_file()
