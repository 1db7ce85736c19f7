"""Which settings to try next: a fixed list (grid, random draws) or Optuna; both are Searchers."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from treeprop_ray.errors import UserError
from treeprop_ray.sweep.plan import Sweep
from treeprop_ray.sweep.space import Axis, Point, Space, grid_points, show

TRIES = 1000  # draws before a space counts as exhausted


class Listed(Searcher):  # type: ignore[misc]
    """Hands out trials in their order."""

    def __init__(self, configs: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.waiting = list(configs)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        return self.waiting.pop(0) if self.waiting else Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Nothing is learnt."""

    def save(self, checkpoint_path: str) -> None:
        """The run folders are the state."""

    def restore(self, checkpoint_path: str) -> None:
        """The run folders are the state."""


def draw_points(space: Space, count: int) -> list[Point]:
    """`count` different settings at random, the same ones every time; all of a smaller grid."""
    axes = [axis for grid in space.grids for axis in grid.values()]
    if all(isinstance(axis, list) for axis in axes):
        points = list(grid_points(space))
        return random.Random(0).sample(points, min(count, len(points)))
    gen = random.Random(0)
    drawn: dict[tuple[str, ...], Point] = {}
    for _ in range(TRIES):
        grid = gen.choice(space.grids)
        point = {key: _draw(axis, gen) for key, axis in grid.items()}
        if not space.excluded(point):
            drawn.setdefault(tuple(show(v) for v in point.values()), point)
        if len(drawn) == count:
            break
    return list(drawn.values())


def _draw(axis: Axis, gen: random.Random) -> Any:
    if isinstance(axis, list):
        return gen.choice(axis)
    kind, (low, high) = next(iter(axis.items()))
    if kind == "randint":
        return gen.randint(low, high)
    if kind == "uniform":
        return float(f"{gen.uniform(low, high):.4g}")
    return float(f"{math.exp(gen.uniform(math.log(low), math.log(high))):.4g}")


def optuna_search(
    sweep: Sweep, known: Sequence[tuple[Point, float]], take: Callable[[Point], bool]
) -> Searcher:
    """Ray's Optuna searcher over the sweep's axes, taught with the trials that are finished.

    `take` says whether a proposal is to be run.
    """
    try:
        import optuna
        from ray.tune.search.optuna import OptunaSearch
    except ImportError as e:
        raise UserError("search=optuna: needs `pip install optuna`") from e
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if len(sweep.space.grids) > 1:
        raise UserError("search=optuna: this sweep is a union of grids; use search=random")

    class Usable(OptunaSearch):  # type: ignore[misc]
        """Skips settings that the sweep excludes, that make no sense or that were tried before."""

        def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
            for _ in range(TRIES):
                if left is not None and not left:
                    break
                point = super().suggest(trial_id)
                if point is None:
                    return None
                point = {key: _rounded(value) for key, value in point.items()}
                is_new = left is None or name(point) in left
                if left is not None:
                    left.discard(name(point))
                if is_new and take(point):
                    return {**point, "seed": sweep.seeds[0]}
                super().on_trial_complete(trial_id, error=True)
                with contextlib.suppress(KeyError):
                    self._ot_trials.pop(trial_id)
            return Searcher.FINISHED  # all that there is has been tried

    grid = sweep.space.grids[0]
    axes = {key: _distribution(axis) for key, axis in grid.items()}

    def name(point: Point) -> tuple[str, ...]:
        return tuple(show(point[key]) for key in axes)

    left: set[tuple[str, ...]] | None = None  # what a space without ranges still has
    if all(isinstance(axis, list) for axis in grid.values()):
        left = {name(p) for p in grid_points(sweep.space)} - {name(p) for p, _ in known}
    given: dict[str, Any] = {}
    if known:
        given = {
            "points_to_evaluate": [dict(point) for point, _ in known],
            "evaluated_rewards": [value for _, value in known],
        }
    # the sampler's seed moves with what is known, or a resumed search would repeat its draws
    sampler = optuna.samplers.TPESampler(seed=len(known))
    return Usable(axes, metric="score", mode=sweep.space.mode, sampler=sampler, **given)


def _rounded(value: Any) -> Any:
    """Four digits, as random draws have: names and commands stay short, and mean what was run."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _distribution(axis: Axis) -> Any:
    from optuna import distributions

    if isinstance(axis, list):
        return distributions.CategoricalDistribution(axis)
    kind, (low, high) = next(iter(axis.items()))
    if kind == "randint":
        return distributions.IntDistribution(low, high)
    return distributions.FloatDistribution(low, high, log=kind == "loguniform")


def scheduler(name: str, mode: str, epochs: int) -> Any:
    """None, or asynchronous successive halving over epochs; a population is a list of its own."""
    if name != "asha":
        return None
    return ASHAScheduler(
        time_attr="epoch",
        metric="score",
        mode=mode,
        max_t=epochs,
        grace_period=max(1, epochs // 9),
        reduction_factor=3,
    )
