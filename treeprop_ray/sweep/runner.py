"""Runs the trials of a sweep under Ray Tune: each is the ordinary Trainer in its own run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Callback

from treeprop_ray.engine import runtime
from treeprop_ray.engine.watch import LastWord, Watch
from treeprop_ray.errors import UserError
from treeprop_ray.run.loggers import check_trackers
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.sweep import population
from treeprop_ray.sweep.plan import FINISHED, STOPPED, Sweep, Trial, past_trials, read_json
from treeprop_ray.sweep.resources import need
from treeprop_ray.sweep.rows import log_command
from treeprop_ray.sweep.search import Listed, optuna_search, scheduler
from treeprop_ray.sweep.settings import TuneSettings
from treeprop_ray.sweep.view import View
from treeprop_ray.sweep.worker import run_trial, trial_of, validation_of

# Tune's own outputs are not wanted: runs have their TensorBoard events, their logs and their state.
QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


class Follow(Callback):  # type: ignore[misc]
    """Hears from Tune how trials go and tells the view."""

    def __init__(self, sweep: Sweep, view: View) -> None:
        self.sweep, self.view = sweep, view
        self.last: dict[str, tuple[int, float]] = {}  # epoch and score that a trial reported last
        self.failed: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune stores its callbacks, but a view belongs to this terminal

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """A trial begins."""
        self.view.start(trial_of(self.sweep, trial.config))

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any
    ) -> None:
        """An evaluation."""
        mine = trial_of(self.sweep, trial.config)
        self.last[mine.settings.name] = (result["epoch"], result["score"])
        self.view.result(mine, result["epoch"], result["score"])

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Trained to the end, or stopped by the scheduler before it."""
        mine = trial_of(self.sweep, trial.config)
        if trial.config.get("until", mine.settings.epochs) < mine.settings.epochs:
            self.view.paused(mine)
            return
        summary = read_json(mine.folder / "summary.json")
        if summary is None or mine.state() != FINISHED:
            epoch, score = self.last.get(mine.settings.name, (0, None))
            stopped = {"epoch": epoch, "score": score}
            (mine.folder / "stopped.json").write_text(json.dumps(stopped))
            self.view.stopped(mine, epoch)
        else:
            self.view.finished(mine, summary)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """A trial has failed; the others go on."""
        mine = trial_of(self.sweep, trial.config)
        if not mine.error_file.is_file():  # the process died without a word
            lines = str(trial.get_error() or "").strip().splitlines() or ["the trial died"]
            mine.error_file.parent.mkdir(parents=True, exist_ok=True)
            mine.error_file.write_text(lines[-1])
        self.failed.append(mine.settings.name)
        self.view.failed(mine, mine.error_file.read_text())


def run_sweep(settings: TuneSettings, sweep: Sweep) -> list[str]:
    """Run what is not finished; returns the names of trials that failed."""
    os.environ.update({k: v for k, v in QUIET.items() if k not in os.environ})
    check_trackers(settings.wandb, settings.mlflow)
    owns = runtime.start(settings.ray)
    way_on = f"no finished trial is lost; this continues: {sweep.command}"
    last_word = LastWord(f"failed: Ray or a signal has ended this process; {way_on}")

    def told() -> str:
        last_word.done()
        return way_on

    watch = Watch(told)
    watch.start()
    try:
        cluster = runtime.cluster()
        if sweep.population:
            return _population(settings, sweep, cluster)
        if settings.search == "optuna":
            return _optuna(settings, sweep, cluster)
        todo = [t for t in sweep.trials() if t.state() not in (FINISHED, STOPPED)]
        return _listed(settings, sweep, cluster, todo)
    finally:
        watch.stop()
        last_word.done()
        if owns:
            runtime.stop()


def _listed(settings: TuneSettings, sweep: Sweep, cluster: Cluster, todo: list[Trial]) -> list[str]:
    every = list(sweep.trials())
    for trial in todo:
        need(trial.settings, cluster)  # raises before anything starts
    log_command(sweep.folder, sweep.command)
    if not todo:
        print(f"all {len(every)} trials are finished")
        return []
    configs = [{**trial.point, "seed": trial.seed} for trial in todo]
    view = View(sweep.name, len(every), len(every) - len(todo), sweep.space.metric)
    return _fit(settings, sweep, cluster, Listed(configs), len(configs), view)


def _population(settings: TuneSettings, sweep: Sweep, cluster: Cluster) -> list[str]:
    """Train, compare, let weak members take over, and so on to the last epoch."""
    members = list(sweep.trials())
    for trial in members:
        need(trial.settings, cluster)
    log_command(sweep.folder, sweep.command)
    state = population.Population.of(sweep)
    epochs = sweep.epochs
    for until in population.rounds(epochs):
        if until <= state.moved:
            continue
        is_last = until == epochs
        todo = [t for t in members if not (t.state() == FINISHED or state.decided(until))]
        todo = [t for t in todo if is_last or until not in population.reached(t)]
        if todo:
            view = View(sweep.name, len(members), len(members) - len(todo), sweep.space.metric)
            given = population.configs(todo, state, until)
            if failed := _fit(settings, sweep, cluster, Listed(given), len(given), view):
                return failed
        if not is_last:
            if not state.decided(until):
                scores = {t.settings.name: population.reached(t)[until] for t in members}
                state.decide(sweep, scores, until)
            state.move(sweep, until)
    return []


def _optuna(settings: TuneSettings, sweep: Sweep, cluster: Cluster) -> list[str]:
    """First what was cut short, then new suggestions that know all finished trials."""
    log_command(sweep.folder, sweep.command)
    past = past_trials(sweep)
    cut = [t for t in past if t.state() not in (FINISHED, STOPPED)]
    failed: list[str] = []
    view = View(sweep.name, settings.samples, len(past) - len(cut), sweep.space.metric)
    if cut:
        configs = [{**t.point, "seed": t.seed} for t in cut]
        failed += _fit(settings, sweep, cluster, Listed(configs), len(cut), view)
    known = []
    for trial in past:
        summary = read_json(trial.folder / "summary.json")
        if summary is not None:
            known.append((trial.point, validation_of(sweep.space.metric, summary)))
    tried = {trial.settings.name for trial in past}

    def take(point: Mapping[str, Any]) -> bool:
        """Whether a proposal is to be run; once at most, as equal ones would share a folder."""
        try:
            trial = sweep.trial(point, sweep.seeds[0])
            need(trial.settings, cluster)
        except UserError:
            return False
        if sweep.space.excluded(point) or trial.settings.name in tried:
            return False
        tried.add(trial.settings.name)
        return True

    left = settings.samples - len(past)
    if left <= 0:
        print(f"{len(past)} settings are tried; samples={settings.samples} asks for no more")
        return failed
    search = optuna_search(sweep, known, take)
    return failed + _fit(settings, sweep, cluster, search, left, view)


def _fit(
    settings: TuneSettings,
    sweep: Sweep,
    cluster: Cluster,
    search: Any,
    count: int,
    view: View,
) -> list[str]:
    """One call of Tune."""

    def bundles(config: Mapping[str, Any]) -> Any:
        needs = need(trial_of(sweep, config).settings, cluster)
        return tune.PlacementGroupFactory(needs.bundles, strategy=needs.strategy)

    follow = Follow(sweep, view)
    trainable = tune.with_parameters(
        run_trial, sweep=sweep, cluster=cluster, wandb=settings.wandb, mlflow=settings.mlflow
    )
    tuner = tune.Tuner(
        tune.with_resources(trainable, bundles),
        tune_config=tune.TuneConfig(
            search_alg=search,
            scheduler=scheduler(settings.scheduler, sweep.space.mode, sweep.epochs),
            num_samples=count,
            max_concurrent_trials=settings.max_concurrent or None,
            reuse_actors=True,  # a process imports torch once
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(Path(sweep.folder) / ".tune"),
            failure_config=tune.FailureConfig(max_failures=0),
            callbacks=[follow],
            verbose=0,
        ),
    )
    with view:
        tuner.fit()
    return follow.failed
