"""Metrics and callbacks of one's own, named by settings: train, tune, both engines, resume."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from conftest import Result
from warm import warm_ray

from treeprop_ray.run import checkpoint

Command = Callable[..., Result]
SMALL = ["model.hidden=8", "model.blocks=3", "batch=128", "steps=9", "checkpoint_every=3"]
METRICS = ["own_hooks:sure", "own_hooks:misses", "own_hooks:Seen"]
OWN = [f"metrics=[{','.join(METRICS)}]", "callbacks=[own_hooks:Diary]"]
ACTORS = ["engine=ray", "placement=packed", "hosts=2", "cpus_per_actor=0.5"]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def weights(run: Path) -> dict[str, torch.Tensor]:
    point = checkpoint.newest(run / "checkpoints")
    assert point is not None
    return dict(point.weights)


def test_own_metrics_and_callbacks_serve_both_engines_and_survive_resume(
    command: Command, tmp_path: Path, local_ray: None
) -> None:
    words = [*SMALL, f"out={tmp_path}"]
    assert command("train", *words, "name=plain").code == 0
    assert command("train", *words, *OWN, "name=one").code == 0
    falls = [*words, *OWN[:1], "callbacks=[own_hooks:Diary,own_hooks:Falls]", *ACTORS, "name=two"]
    fallen = command("train", *falls)
    assert fallen.code == 1 and len(fallen.error_lines) == 1, fallen.err
    assert "callbacks=own_hooks:Falls: ValueError: eight is too much (own_hooks.py, line" in (
        fallen.err
    )
    assert command("train", *falls).code == 0

    plain, one, two = (weights(tmp_path / name) for name in ("plain", "one", "two"))
    for other in (one, two):
        assert plain.keys() == other.keys()
        assert all(torch.equal(plain[key], other[key]) for key in plain)
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("one", "two")]
    for summary in summaries:
        full = summary["final"]["test"]["full"]
        assert full["Seen"] == summary["samples"]["test"]
        assert full["misses"] == 10 and 0.1 < full["sure"] <= 1
    assert summaries[0]["final"] == summaries[1]["final"]
    diaries = [(tmp_path / name / "diary").read_text().splitlines() for name in ("one", "two")]
    assert diaries[0][0] == "start 0" and diaries[0][-1] == "end 9"
    assert diaries[1][0] == "start 0" and diaries[1][1] in ("start 3", "start 6")
    assert diaries[1][2:] == diaries[0][1:]
    kept = yaml.safe_load((tmp_path / "two" / "config.yaml").read_text())
    assert kept["metrics"] == METRICS
    assert kept["callbacks"] == ["own_hooks:Diary", "own_hooks:Falls"]
    with (tmp_path / "two" / "metrics.csv").open() as f:
        (epoch,) = [row for row in csv.DictReader(f) if row["kind"] == "epoch"]
    assert float(epoch["Seen/spine-1"]) > 0


def test_the_trials_of_a_sweep_have_them_too(
    command: Command, tmp_path: Path, local_ray: None
) -> None:
    space = tmp_path / "mine.yaml"
    space.write_text(
        "title: mine\nbase: digits\nspace: {lr: [0.01, 0.001]}\nseeds: [1]\n"
        "metric: validation/full/loss\n"
    )
    done = command("tune", f"sweep={space}", f"storage={tmp_path}", f"out={tmp_path}", *SMALL, *OWN)
    assert done.code == 0, done.err
    runs = [path.parent for path in (tmp_path / "mine").glob("*/summary.json")]
    assert len(runs) == 2
    for run in runs:
        assert json.loads((run / "summary.json").read_text())["final"]["test"]["full"]["Seen"] > 0
        assert (run / "diary").read_text().splitlines()[-1] == "end 9"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["metrics=[f1]"], "metrics=f1: must be package.module:name"),
        (["metrics=own_hooks:sure"], "metrics=own_hooks:sure: a list such as"),
        (["metrics=[own_hooks:none]"], "metrics=own_hooks:none: cannot be imported"),
        (["metrics=[own_hooks:loss]"], "metrics=loss: is scored anyway"),
        (["metrics=[own_hooks:three]"], "metrics=own_hooks:three: must take (outputs, targets)"),
        (["metrics=[own_hooks:number]"], "metrics=own_hooks:number: gives int, must give a func"),
        (["metrics=[own_hooks:fails]"], "metrics=own_hooks:fails: factory() failed: Val"),
        (["metrics=[own_hooks:sure,own_hooks:sure]"], "one of them is there twice"),
        (["metrics=[own_hooks:sure]", "experiment=digits_gru"], "is for networks of blocks"),
        (["metrics=[own_hooks:sure]", "method=bp", "engine=train"], "needs engine=local or ray"),
        (["callbacks=[mine]"], "callbacks=mine: must be package.module:name"),
        (["callbacks=[own_hooks:fails]"], "callbacks=own_hooks:fails: factory() failed: Val"),
        (["callbacks=[own_hooks:number]"], "callbacks=own_hooks:number: gives int, must"),
        (["callbacks=[own_hooks:NUMBER]"], "callbacks=own_hooks:NUMBER: NUMBER is of type int"),
    ],
)  # fmt: skip
def test_a_wrong_use_is_one_line_and_writes_nothing(
    words: list[str], says: str, command: Command, tmp_path: Path
) -> None:
    result = command("train", *words, f"out={tmp_path}", "name=r")
    assert result.code == 2 and len(result.error_lines) == 1, result.err
    assert says in result.err
    assert not (tmp_path / "r").exists()
