"""Run a sweep with Ray Tune: every trial is an ordinary `train` run, the table writes itself.

    python -m treeprop_ray.tune sweep=alpha_beta                  # minutes, embedded digits
    python -m treeprop_ray.tune sweep=alpha_beta base=cifar10_vit # the paper's own setting
    python -m treeprop_ray.tune sweep=noise_scale seeds=[1] epochs=5 sigma=[0,0.01]
    python -m treeprop_ray.tune sweep=mine.yaml search=optuna samples=30 scheduler=asha

Keys that are not of this command go to the base experiment; a key that the sweep varies takes a
list, its new values. The same command again continues: finished trials are never repeated. Flags:
--help, --cfg, --dry-run (list trials, resources and an estimate of the time, and stop), --record
(table and figure go to results/, the project's own pages, and not to results/local).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from treeprop_ray.config import PUBLISHED, cli
from treeprop_ray.sweep.settings import TuneSettings, load


def run(settings: TuneSettings) -> int:
    """The tune command."""
    from treeprop_ray.sweep.command import sweep_of
    from treeprop_ray.sweep.report import write_sweep
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
    from treeprop_ray.sweep.command import sweep_of
    from treeprop_ray.sweep.plan import FINISHED, STOPPED, read_json
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
    flags = {"--dry-run": dry_run}
    return cli.main(__doc__ or "", TuneSettings, load, run, None, argv, flags, f"out={PUBLISHED}")


if __name__ == "__main__":
    sys.exit(main())
