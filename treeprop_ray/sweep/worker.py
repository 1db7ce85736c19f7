"""What a Tune worker does: one trial, which is an ordinary run in its own folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from typing import Any

from ray import tune

from treeprop_ray.config import Settings
from treeprop_ray.core.scoring import Score
from treeprop_ray.errors import TrainingError, UserError, first_line
from treeprop_ray.reporting.callbacks import standard
from treeprop_ray.run.callbacks import Callback, Scores
from treeprop_ray.run.trainer import Trainer
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.sweep import population
from treeprop_ray.sweep.plan import Sweep, Trial
from treeprop_ray.sweep.resources import pin


class Reporting(Callback):
    """Tells Tune of every evaluation but the last: a scheduler may end a trial at any report, and
    the last one must find a summary."""

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def on_epoch(self, run: Trainer, epoch: int, scores: Scores) -> None:
        """An evaluation."""
        if epoch < run.settings.epochs:
            tune.report({"epoch": epoch, "score": score_of(self.metric, scores)})


class Paused(Exception):
    """A member of a population has come as far as it was asked to."""


class Pausing(Callback):
    """Notes a member's scores, and ends its training for now after so many epochs."""

    def __init__(self, metric: str, until: int) -> None:
        self.metric, self.until = metric, until

    def on_epoch(self, run: Trainer, epoch: int, scores: Scores) -> None:
        """An evaluation; the checkpoint of this epoch is written."""
        assert run.folder is not None
        population.note(run.folder.path, epoch, score_of(self.metric, scores))
        if epoch == self.until < run.settings.epochs:
            raise Paused


def run_trial(
    config: Mapping[str, Any], sweep: Sweep, cluster: Cluster, wandb: str = "", mlflow: str = ""
) -> None:
    """Train, report every evaluation, leave one line if it fails."""
    trial, metric = trial_of(sweep, config), sweep.space.metric
    settings = replace(pin(trial.settings, cluster), wandb=wandb, mlflow=mlflow)
    log = trial.error_file.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    trial.error_file.unlink(missing_ok=True)
    (trial.folder / "stopped.json").unlink(missing_ok=True)
    with log.open("a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            ends: list[Callback] = [Reporting(metric)]
            if "until" in config:
                settings = as_member(settings, config["values"])
                ends.append(Pausing(metric, config["until"]))
            callbacks = [*standard(settings), *ends]
            summary = Trainer.of(settings, trial.command, callbacks).train()
        except Paused:
            return
        except Exception as e:
            kind = "" if isinstance(e, TrainingError | UserError) else f"{type(e).__name__}: "
            trial.error_file.write_text(kind + first_line(e))
            raise
    tune.report({"epoch": settings.epochs, "score": validation_of(metric, summary)})


def as_member(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with which a member goes on; a checkpoint at every epoch."""
    member = deepcopy(settings)
    fixed = {"resume_with_changes": True, "checkpoint_every": 0, "eval_every": 1}
    for key, value in {**fixed, **values}.items():
        *groups, name = key.split(".")
        setattr(reduce(getattr, groups, member), name, value)
    return member


def trial_of(sweep: Sweep, config: Mapping[str, Any]) -> Trial:
    """The trial that a Tune config stands for."""
    return sweep.trial({k: config[k] for k in sweep.space.axes}, config["seed"])


def score_of(metric: str, scores: Scores) -> float:
    """The metric on the validation split, which is what searches and schedulers look at; NaN for
    one that is no score (leak, work)."""
    if metric.count("/") != 2:
        return math.nan
    _, path, kind = metric.split("/")
    score = scores.get(path) or scores["full"]
    if kind == "perplexity":
        return math.exp(min(score.loss, 700.0))
    value = float(getattr(score, kind))
    if math.isnan(value) and kind == "accuracy":
        raise UserError(f"metric={metric}: this loss knows no right and wrong; use {path}/loss")
    return value


def validation_of(metric: str, summary: Mapping[str, Any]) -> float:
    """The metric of a finished run on the validation split."""
    scores = summary["final"]["validation"]
    by_path = {p: Score(v["loss"], v.get("accuracy", math.nan)) for p, v in scores.items()}
    return score_of(metric, by_path)
