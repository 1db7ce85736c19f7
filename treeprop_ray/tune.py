"""Run a sweep with Ray Tune: every trial is an ordinary `train` run, the table writes itself.

    python -m treeprop_ray.tune sweep=alpha_beta                  # minutes, embedded digits
    python -m treeprop_ray.tune sweep=alpha_beta base=cifar10_vit # the paper's own setting
    python -m treeprop_ray.tune sweep=noise_scale seeds=[1] epochs=5 sigma=[0,0.01]
    python -m treeprop_ray.tune sweep=mine.yaml search=optuna samples=30 scheduler=asha

Keys that are not of this command go to the base experiment; a key that the sweep varies takes a
list, its new values. The same command again continues: finished trials are never repeated. Flags:
--help, --cfg, --dry-run (list trials, resources and an estimate of the time, and stop).
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeprop_ray import cli, config
from treeprop_ray.config import RaySettings, group, opt, spaces
from treeprop_ray.errors import UserError
from treeprop_ray.sweep.plan import FINISHED, STOPPED, Sweep, resolve


@dataclass
class TuneSettings:
    """Settings of the tune command."""

    sweep: str = opt("", "a file of tune_spaces/, or a path to your own .yaml")
    base: str = opt("", "experiment behind the trials; default: the one the sweep names")
    seeds: Any = opt(None, "list of seeds; default: those of the sweep")
    search: str = opt(
        "grid", "all settings, random ones, or Optuna's", choices=["grid", "random", "optuna"]
    )
    samples: int = opt(20, "settings to try with search=random or optuna", low=1)
    scheduler: str = opt("none", "asha: end weak trials early", choices=["none", "asha"])
    max_concurrent: int = opt(0, "trials at the same time; 0 = as many as fit", low=0)
    storage: str = opt(
        "results/runs", "folder of the run folders; on a cluster one that all machines see"
    )
    out: str = opt("results", "folder of table and figure")
    wandb: str = opt("", "Weights & Biases project to log to")
    mlflow: str = opt("", "MLflow tracking URI to log to")
    ray: RaySettings = group(RaySettings)
    overrides: Any = opt(None, "not a key: every other key=value goes to the base experiment")
    command: str = opt("", "not a key: how the sweep was called")


NEUTRAL = ("storage", "out", "max_concurrent", "wandb", "mlflow", "ray")  # change no figure


def load(words: Sequence[str]) -> TuneSettings:
    """Settings of this command, and the words that are for the base experiment."""
    own = {f.name for f in dataclasses.fields(TuneSettings)} - {"overrides", "command"}
    config.parse_overrides(words)
    roots = [word.partition("=")[0].partition(".")[0] for word in words]
    mine = [w for w, root in zip(words, roots, strict=True) if root in own]
    settings: TuneSettings = config.merge(TuneSettings, ("", config.parse_overrides(mine)))
    settings.overrides = [w for w, root in zip(words, roots, strict=True) if root not in own]
    counted = [w for w, root in zip(words, roots, strict=True) if root not in NEUTRAL]
    settings.command = shlex.join(["python", "-m", "treeprop_ray.tune", *counted])
    if "://" in settings.storage:
        raise UserError(f"storage={settings.storage}: run folders need a folder, not a URL")
    if not settings.sweep:
        raise UserError(
            f"sweep= : one of {', '.join(spaces.shipped())}, or a path of your own .yaml"
        )
    return settings


def sweep_of(settings: TuneSettings) -> Sweep:
    """The sweep that the settings name."""
    s = settings
    made = resolve(s.sweep, s.base, s.overrides or [], s.seeds, s.storage, s.command)
    if s.search == "random":
        from treeprop_ray.sweep.search import draw_points

        return dataclasses.replace(made, points=draw_points(made.space, s.samples))
    if s.search == "optuna":
        if s.seeds is not None and len(made.seeds) > 1:
            raise UserError(f"seeds={s.seeds}: search=optuna compares settings at one seed")
        return dataclasses.replace(made, points=(), seeds=made.seeds[:1])
    return made


def sweep_of_command(command: str, storage: str = "results/runs") -> Sweep:
    """The sweep of a recorded tune command."""
    settings = load([*shlex.split(command)[3:], f"storage={storage}"])
    return sweep_of(settings)


def run(settings: TuneSettings) -> int:
    """The tune command."""
    from treeprop_ray.report import write_sweep
    from treeprop_ray.sweep.runner import run_sweep

    sweep = sweep_of(settings)
    list(sweep.trials())  # a setting that makes no sense is found before anything is written
    cli.quiet()
    failed = run_sweep(settings, sweep)
    print(write_sweep(sweep.name, settings.storage, Path(settings.out)))
    if failed:
        print(f"{len(failed)} trials failed; the same command tries them again", file=sys.stderr)
        return cli.FAILED
    return cli.DONE


def dry_run(settings: TuneSettings) -> None:
    """What the command would do."""
    from treeprop_ray.engine import runtime
    from treeprop_ray.sweep.plan import read_json
    from treeprop_ray.sweep.resources import need, side_by_side
    from treeprop_ray.sweep.view import clock

    sweep, cluster = sweep_of(settings), runtime.cluster_of(settings.ray)
    trials = list(sweep.trials())
    states = [trial.state() for trial in trials]
    for trial, state in zip(trials, states, strict=True):
        print(f"{state:<9} {need(trial.settings, cluster)}  {trial.text}\n    {trial.command}")
    if settings.search == "optuna":
        print(f"search=optuna: {settings.samples} settings, chosen as results come in")
        return
    left = [t for t, s in zip(trials, states, strict=True) if s not in (FINISHED, STOPPED)]
    side = side_by_side(left, cluster, settings.max_concurrent)
    print(f"{len(trials)} trials, {len(trials) - len(left)} done; {side} at a time on {cluster}")
    walls = [
        summary["wall_seconds"]
        for t in trials
        if (summary := read_json(t.folder / "summary.json")) is not None
    ]
    if walls:
        each = sum(walls) / len(walls)
        print(f"about {clock(each * len(left) / side)} left ({each:.1f} s per finished trial)")
    else:
        print("time: no trial is finished yet; ask again after the first")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.tune`."""
    return cli.main(__doc__ or "", TuneSettings, load, run, argv=argv, flags={"--dry-run": dry_run})


if __name__ == "__main__":
    sys.exit(main())
