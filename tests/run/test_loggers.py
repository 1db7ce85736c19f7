"""Loggers and early stopping, alike in train, fit and tune."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import Result
from torch import nn
from warm import warm_ray

from treeprop_ray import Callback, TreeNetwork, config, fit
from treeprop_ray.errors import UserError
from treeprop_ray.run import checkpoint
from treeprop_ray.run.trainer import Trainer

Command = Callable[..., Result]
SMALL = ["model.hidden=8", "model.blocks=3", "batch=128", "name=r"]
# nothing is learnt at this rate: the first epoch stays the best
IDLE = [*SMALL, "optimizer=sgd", "lr=1e-12", "patience=2", "epochs=9"]
ENGINES: list[dict[str, Any]] = [
    {"engine": "local"},
    {"engine": "ray", "placement": "packed", "hosts": 2},
]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def network() -> TreeNetwork:
    torch.manual_seed(0)
    own = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)]
    return TreeNetwork.from_blocks(None, own, nn.Linear(5, 2), example=torch.zeros(2, 5))


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loggers", [[], ["csv"], ["tensorboard"], ["tensorboard", "csv"]])
def test_a_run_writes_what_loggers_says(
    command: Command, tmp_path: Path, loggers: list[str]
) -> None:
    words = [*SMALL, f"out={tmp_path}", "epochs=1", f"loggers=[{','.join(loggers)}]"]
    assert command("train", *words).code == 0
    written = {p.name for p in (tmp_path / "r").iterdir()}
    assert ("metrics.csv" in written) == ("csv" in loggers)
    assert ("tensorboard" in written) == ("tensorboard" in loggers)
    assert "summary.json" in written


def test_mistakes_in_loggers_are_one_line(command: Command, tmp_path: Path) -> None:
    result = command("train", f"out={tmp_path}", "loggers=[csv,excel]")
    assert result.code == 2 and "some of tensorboard, csv" in result.err
    assert command("train", f"out={tmp_path}", "loggers=csv").code == 2
    assert not list(tmp_path.iterdir())


def test_new_settings_leave_the_names_of_old_runs_alone() -> None:
    assert config.run_name(config.load([])) == config.run_name(config.load(["loggers=[]"]))
    assert config.run_name(config.load([])) != config.run_name(config.load(["patience=3"]))


# -- trackers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_missing_tracker_says_what_to_install(
    command: Command, tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("treeprop_ray.run.loggers.find_spec", lambda name: None)
    result = command("train", *SMALL, f"out={tmp_path}", f"{tracker}=here")
    assert result.code == 2 and f"`pip install {tracker}`" in result.err
    x, y = samples()
    with pytest.raises(UserError, match=f"{tracker}=here: needs `pip install"):
        fit(network(), x, y, epochs=1, **{tracker: "here"})


def test_mlflow_gets_metrics_settings_and_scores(command: Command, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    words = [*SMALL, f"out={tmp_path / 'sweep'}", "epochs=2", f"mlflow={uri}"]
    assert command("train", *words).code == 0
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("sweep").experiment_id])
    assert run.info.run_name == "r" and run.info.status == "FINISHED"
    assert run.data.params["model.hidden"] == "8" and "final/test/full/accuracy" in run.data.metrics
    assert [m.step for m in client.get_metric_history(run.info.run_id, "accuracy/full")] == [10, 20]


def test_wandb_gets_a_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = [*SMALL, f"out={tmp_path}", "epochs=1", "wandb=mine"]
    assert command("train", *words).code == 0
    assert list((tmp_path / "r" / "wandb").glob("offline-run-*/*.wandb"))


# -- early stopping ------------------------------------------------------------------------------


def test_a_run_without_progress_ends_as_finished_and_is_not_taken_up(
    command: Command, tmp_path: Path
) -> None:
    result = command("train", *IDLE, f"out={tmp_path}", "checkpoint_every=1000")
    assert result.code == 0 and "no better validation score since epoch 1" in result.out
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["steps"] == 30 and summary["epochs"] == 3 and "patience=2" in summary["stopped"]
    point = checkpoint.newest(tmp_path / "r" / "checkpoints")
    assert point is not None and point.meta["step"] == 30
    again = command("train", *IDLE, f"out={tmp_path}", "checkpoint_every=1000")
    assert again.code == 0 and "this run is finished" in again.out
    longer = command("train", *IDLE, f"out={tmp_path}", "patience=4")
    assert longer.code == 0 and "continuing from" in longer.out
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["epochs"] == 5


def test_patience_counts_on_over_an_interruption(command: Command, tmp_path: Path) -> None:
    assert command("train", *IDLE, f"out={tmp_path}", "steps=20").code == 0
    assert command("train", *IDLE, f"out={tmp_path}").code == 0
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["steps"] == 30


def test_forward_forward_must_come_to_its_head(command: Command, tmp_path: Path) -> None:
    result = command("train", "method=cff", "patience=2", f"out={tmp_path}")
    assert result.code == 2 and "patience=2" in result.err


# -- fit -----------------------------------------------------------------------------------------


class StopAfter(Callback):
    """Ends a run in the middle of an epoch, as a finished one."""

    def on_step(self, run: Trainer, done: int) -> None:
        if done == 6:
            run.stop("enough")


def test_fit_gives_history_scores_paths_folder_and_summary(local_ray: None, tmp_path: Path) -> None:
    x, y = samples()
    results = [
        fit(network(), x, y, validation=(x, y), batch=16, epochs=3, log_every=2, **where)
        for where in ENGINES
    ]
    a, b = (r.network.state_dict() for r in results)
    assert all(torch.equal(a[k], b[k]) for k in a)
    timing = ["step_seconds", "data_share"]
    pd.testing.assert_frame_equal(*(r.history.drop(columns=timing) for r in results))
    result = results[0]
    assert list(result.history[result.history.kind == "epoch"].epoch) == [1, 2, 3]
    assert (
        result.scores["validation"]["full"]["accuracy"] == result.history["accuracy/full"].iloc[-1]
    )
    assert result.paths["full"] == [0, 1, 2, 3, 4] and result.folder is None
    assert result.summary["steps"] == 12

    kept = fit(network(), x, y, batch=16, epochs=3, log_every=2, out=str(tmp_path), name="r")
    assert kept.folder == tmp_path / "r" and kept.scores == {}
    assert list(kept.history.columns) == list(result.history.columns)


@pytest.mark.parametrize("how", ["callback", "patience"])
def test_a_callback_or_patience_ends_fit_alike_on_both_engines(local_ray: None, how: str) -> None:
    x, y = samples()
    words: dict[str, Any] = {"batch": 16, "epochs": 3, "validation": (x, y)}
    if how == "patience":
        words |= {"epochs": 9, "patience": 2, "optimizer": "sgd", "lr": 1e-12}
    states = []
    for where in ENGINES:
        callbacks = [StopAfter()] if how == "callback" else []
        result = fit(network(), x, y, callbacks=callbacks, **words, **where)
        states.append(result.network.state_dict())
        if how == "callback":
            assert result.summary["steps"] == 6 and result.summary["stopped"] == "enough"
        else:
            assert result.summary["epochs"] == 3
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


def test_patience_in_fit_needs_validation() -> None:
    with pytest.raises(UserError, match=r"patience=2: needs validation=\(x, y\)"):
        fit(network(), *samples(), batch=16, epochs=9, patience=2)


def test_fit_works_outside_the_main_thread() -> None:
    """As it must in a notebook: signals are for the main thread only."""
    import threading

    x, y = samples()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fit(network(), x, y, epochs=1)))
    thread.start()
    thread.join()
    assert len(results) == 1 and "ray" in sys.modules
