"""From a tune command, today's or a recorded one, to its sweep."""

from __future__ import annotations

import dataclasses
import shlex

from treeprop_ray.errors import UserError
from treeprop_ray.sweep import population
from treeprop_ray.sweep.plan import Sweep, resolve
from treeprop_ray.sweep.search import draw_points
from treeprop_ray.sweep.settings import TuneSettings, load


def sweep_of(settings: TuneSettings) -> Sweep:
    """The sweep that the settings name."""
    s = settings
    sweep = resolve(s.sweep, s.base, s.overrides or [], s.seeds, s.storage, s.command)
    if sweep.space.metric.count("/") != 2 and (s.search == "optuna" or s.scheduler != "none"):
        raise UserError(
            f"metric={sweep.space.metric}: is no score of a path, by which search={s.search} "
            f"scheduler={s.scheduler} could choose; use <split>/<path>/<accuracy or loss>"
        )
    if s.scheduler == "pbt":
        if s.search == "optuna":
            raise UserError("scheduler=pbt: chooses settings itself; search=grid or random")
        sweep = dataclasses.replace(sweep, population=True)
        population.check(sweep)
    if s.search == "random":
        return dataclasses.replace(sweep, points=draw_points(sweep.space, s.samples))
    if s.search == "optuna":
        if s.seeds is not None and len(sweep.seeds) > 1:
            raise UserError(f"seeds={s.seeds}: search=optuna compares settings at one seed")
        return dataclasses.replace(sweep, points=(), seeds=sweep.seeds[:1])
    return sweep


def sweep_of_command(command: str, storage: str = "results/runs") -> Sweep:
    """The sweep of a recorded tune command."""
    return sweep_of(load([*shlex.split(command)[3:], f"storage={storage}"]))
