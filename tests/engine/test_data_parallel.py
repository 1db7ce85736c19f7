"""Backpropagation with recomputed activations, and with Ray Train's data-parallel workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import Result, engine_of
from torch import distributed

from treeprop_ray import config, data
from treeprop_ray.core.rule import cut
from treeprop_ray.engine import LocalEngine
from treeprop_ray.engine.data_parallel import DataParallelEngine
from treeprop_ray.run import checkpoint
from treeprop_ray.schedule.ops import Op

Command = Callable[..., Result]
VIT = ["method=bp", "model.name=vit", "model.hidden=8", "model.heads=2", "model.blocks=3",
       "model.patch=4", "model.dropout=0.2", "batch=16", "microbatches=2"]  # fmt: skip


def after(engine: LocalEngine, steps: int = 3) -> dict[str, torch.Tensor]:
    for step in range(steps):
        engine.step(step, report=True)
    return engine.state()[0]


def test_recomputed_activations_change_nothing() -> None:
    """Dropout draws the same masks when a block runs again."""
    settings = config.load(VIT)
    samples = data.load(settings)
    plain = after(engine_of(settings, samples, 10))
    again = after(engine_of(config.load([*VIT, "recompute=true"]), samples, 10))
    assert all(torch.equal(plain[k], again[k]) for k in plain)


def test_recompute_keeps_less_for_the_backward_pass() -> None:
    """Numbers that autograd saves between forward and backward."""

    def saved(*words: str) -> int:
        settings = config.load([*VIT, "microbatches=1", *words])
        engine = engine_of(settings, data.load(settings), 10)
        seen: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            seen[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            held = {"z0": torch.randn(16, 4, 8)}
            engine.host.verbs["ahead"](Op("ahead", 0, ("z0",), ("z1",)), held, cut(0, 16, 1)[0])
        return sum(seen.values())

    assert saved("recompute=true") < saved() / 3


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_one_worker_is_the_local_engine(alone: None) -> None:
    """Pieces without synchronisation, dropout, gradient norms, scores."""
    settings = config.load([*VIT, "clip=0.5"])
    samples = data.load(settings)
    oracle = engine_of(settings, samples, 10)
    expected = after(oracle)
    engine = engine_of(config.load([*VIT, "clip=0.5", "engine=train"]), samples, 10)
    assert isinstance(engine, DataParallelEngine)
    found = after(engine)
    assert all(torch.allclose(found[k], expected[k], atol=1e-6) for k in expected)
    mine, theirs = engine.reports()[0], oracle.reports()[0]
    assert mine.losses[4]["ce"] == pytest.approx(theirs.losses[4]["ce"], abs=1e-6)
    full = {"full": engine.tree.chain}
    assert (
        engine.score(full, "test")["full"].accuracy == oracle.score(full, "test")["full"].accuracy
    )


def test_two_workers_go_on_where_one_process_stopped_and_equal_it(
    command: Command, tmp_path: Path
) -> None:
    """One epoch in this process, the second by Ray Train, against two epochs in this process."""
    words = ["method=bp", "model.hidden=16", "model.blocks=3", "model.activation=tanh", "batch=66",
             "microbatches=2", "clip=0.5", "log_every=5", f"out={tmp_path}"]  # fmt: skip
    assert command("train", *words, "epochs=2", "name=whole").code == 0
    assert command("train", *words, "epochs=1", "name=cut").code == 0
    result = command("train", *words, "epochs=2", "name=cut", "engine=train", "hosts=2",
                     "ray.num_cpus=2")  # fmt: skip
    assert result.code == 0, result.err
    whole, cut = (checkpoint.newest(tmp_path / n / "checkpoints") for n in ("whole", "cut"))
    assert whole and cut and whole.meta["step"] == cut.meta["step"] == 38
    assert all(torch.allclose(v, cut.weights[k], atol=1e-5) for k, v in whole.weights.items())
    assert whole.optimizer.keys() == cut.optimizer.keys()
    a, b = (pd.read_csv(tmp_path / n / "metrics.csv") for n in ("whole", "cut"))
    timing = ["step_seconds", "data_share"]
    pd.testing.assert_frame_equal(a.drop(columns=timing), b.drop(columns=timing), rtol=1e-3)
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert summary["engine"] == "train" and summary["samples_seen"] == 38 * 66
    assert "default_worker" not in summary["command"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["engine=train"], "engine=train"),
        (["method=cff", "recompute=true"], "recompute=true"),
        (["method=bp", "engine=train", "batch=4", "hosts=5"], "hosts=5"),
    ],
)
def test_bad_settings_are_one_line(command: Command, words: list[str], key: str) -> None:
    result = command("train", *words)
    assert result.code == 2 and len(result.error_lines) == 1 and key in result.err
