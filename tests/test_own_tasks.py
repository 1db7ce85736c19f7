"""Regression, several labels and masked tokens from the command line, to the end of the line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import own_tasks
import pandas as pd
import pytest
import torch
from conftest import Result
from torch.nn import functional as F
from warm import warm_ray

from treeprop_ray.run import checkpoint

Command = Callable[..., Result]


def token_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())  # torch leaves -100 out


TASKS: dict[str, tuple[str, str, Any]] = {  # data -> network, loss, and torch's own
    "regression": ("regressor", "mse", F.mse_loss),
    "labels": ("tagger", "bce", F.binary_cross_entropy_with_logits),
    "masked": ("filler", "cross_entropy", token_loss),
}  # fmt: skip
SMALL = ["experiment=digits", "family=gaussian", "batch=16", "epochs=2", "lr=0.01"]
RAY = ["engine=ray", "placement=packed", "hosts=2"]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def words_of(task: str, out: Path, name: str) -> list[str]:
    network, loss, _ = TASKS[task]
    return [
        *SMALL, f"data.name=own_tasks:{task}", f"model.name=own_tasks:{network}", f"loss={loss}",
        f"out={out}", f"name={name}", "timeline_steps=0",
    ]  # fmt: skip


def weights(run: Path) -> dict[str, torch.Tensor]:
    point = checkpoint.newest(run / "checkpoints")
    assert point is not None
    return point.weights


def assert_same(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_trained_probed_evaluated_and_exported(
    task: str, command: Command, tmp_path: Path, local_ray: None
) -> None:
    """With actors as in one process; what comes after is asked of the run with actors."""
    for name, where in (("one", []), ("a", RAY)):
        words = [*words_of(task, tmp_path, name), "probe.every=4", "probe.batches=1", *where]
        done = command("train", *words)
        assert done.code == 0, done.err
    assert_same(tmp_path / "one", tmp_path / "a")
    run = tmp_path / "a"
    summary, other = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("a", "one")
    )
    assert summary["final"] == other["final"]
    scores = summary["final"]["test"]["full"]
    assert ("accuracy" in scores) == (task != "regression")

    exported = command("export", f"run={run}")
    assert exported.code == 0, exported.err
    program = torch.export.load(run / "export" / "full" / "model.pt2").module()
    x, y = getattr(own_tasks, task)(None)["test"]
    with torch.no_grad():
        outputs = program(x)
    assert float(TASKS[task][2](outputs, y)) == pytest.approx(scores["loss"], rel=1e-4)

    told = command("evaluate", f"run={run}", "split=test")
    assert told.code == 0, told.err
    shown = f"{scores['loss']:.4g}" if task == "regression" else f"{100 * scores['accuracy']:.2f} %"
    assert shown in told.out

    for name, engine in (("one", "local"), ("a", "ray")):
        words = [f"run={tmp_path / name}", "batches=1", "draws=2", f"engine={engine}"]
        probed = command("probe", *words)
        assert probed.code == 0, probed.err
    assert (run / "probe.csv").read_text() == (tmp_path / "one" / "probe.csv").read_text()
    rows = pd.read_csv(run / "probe.csv")
    assert list(rows["step"])[-1] == 8 and len(rows) >= 3

    adaptive = command("evaluate", f"run={run}", "mode=adaptive", "threshold=[0.15,1]")
    if task == "masked":
        assert adaptive.code == 0, adaptive.err
    else:
        assert adaptive.code == 2 and len(adaptive.error_lines) == 1
        assert f"loss.name={TASKS[task][1]} has none" in adaptive.err


@pytest.mark.long
def test_workers_that_see_unequally_many_labels_equal_one_process(
    command: Command, tmp_path: Path, local_ray: None
) -> None:
    words = ["method=bp", "microbatches=2", "epochs=1"]
    for name, where in (("one", []), ("two", ["engine=train", "hosts=2"])):
        done = command("train", *words_of("masked", tmp_path, name), *words, *where)
        assert done.code == 0, done.err
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


def test_a_stream_over_the_stream_transport_equals_one_process(
    command: Command, tmp_path: Path, local_ray: None
) -> None:
    own = ["data.name=own_tasks:stream", "model.name=own_tasks:tagger", "data.classes=3"]
    there = [*RAY, "transport=stream", "cpus_per_actor=0.5"]
    for name, where in (("one", []), ("two", there)):
        words = [*SMALL, *own, f"out={tmp_path}", f"name={name}", "steps=6", *where]
        done = command("train", *words)
        assert done.code == 0, done.err
    assert_same(tmp_path / "one", tmp_path / "two")


def test_a_sweep_over_own_data_and_an_own_network_equals_a_run_of_the_same_settings(
    command: Command, tmp_path: Path, local_ray: None
) -> None:
    """A model of Hugging Face, in trials in one process and with actors of their own."""
    own = 'data.name: "own_tasks:masked", model.name: "own_tasks:hub"'
    there = "placement: packed, hosts: 2, cpus_per_actor: 0.5"
    space = tmp_path / "mine.yaml"
    space.write_text(
        "title: mine\nbase: digits\nbases: {digits: {settings: {family: gaussian, batch: 16, "
        f"epochs: 1, lr: 0.01, timeline_steps: 0, {own}, {there}}}}}}}\n"
        "space: {engine: [local, ray]}\nseeds: [1]\nmetric: validation/full/loss\n"
    )
    done = command("tune", f"sweep={space}", f"storage={tmp_path / 's'}", f"out={tmp_path / 'o'}")
    assert done.code == 0, done.err
    assert "best: engine=" in done.out
    runs = [path.parent for path in (tmp_path / "s" / "mine").glob("*/summary.json")]
    assert len(runs) == 2
    words = ["data.name=own_tasks:masked", "model.name=own_tasks:hub", "epochs=1"]
    done = command("train", *SMALL, *words, f"out={tmp_path}", "name=alone")
    assert done.code == 0, done.err
    for run in runs:
        assert_same(run, tmp_path / "alone")
