"""A sweep with its base, overrides and seeds: which trials there are and where each one stands.

A trial is an ordinary `train` run in <storage>/<sweep>/<trial>. What is finished is read from the
run folders, never from Tune's own state, so any interruption leaves nothing to mend.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from treeprop_ray import config, methods
from treeprop_ray.config import RESUMABLE, Settings
from treeprop_ray.errors import UserError, warn
from treeprop_ray.run import files
from treeprop_ray.run.folder import read_summary
from treeprop_ray.sweep.parsing import check_axis, check_seeds, load_space
from treeprop_ray.sweep.space import Axis, Base, Case, Point, Space, grid_points, short, show

# of train, but not for a sweep: what to use instead
TAKEN = {
    "experiment": "use base=…",
    "seed": "use seeds=[1,2,3]",
    "name": "trials have names of their own; use storage=… for another folder",
    "fresh": "remove the sweep's folder to start anew",
}
COUNTED = (
    "final", "epochs", "wall_seconds", "commit", "date", "hardware", "versions",
    "parameters_deployed",
)  # fmt: skip # of a summary: what a row needs
SCORES = "scores.json"  # of a member of a population: its validation scores by epoch
FINISHED, STOPPED, FAILED, PART, NEW = "finished", "stopped", "failed", "part done", "new"


@dataclass(frozen=True)
class Trial:
    """One setting with one seed."""

    point: Point
    seed: int
    settings: Settings
    command: str  # the stand-alone train command with the same numbers
    protocol: str  # digest of everything but the axes and the seed: only equals share a cell

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.settings.out) / self.settings.name

    @property
    def error_file(self) -> Path:
        """Holds one line when the last attempt failed; the log is beside it."""
        return Path(self.settings.out) / "logs" / f"{self.settings.name}.error"

    @property
    def text(self) -> str:
        """The setting in a few words."""
        return " ".join([*(f"{k}={short(v)}" for k, v in self.point.items()), f"seed={self.seed}"])

    def state(self) -> str:
        """finished, stopped (by a scheduler), failed, part done or new."""
        summary = read_json(self.folder / "summary.json")
        if summary and (self.folder / "config.yaml").is_file():
            stored = config.load_file(self.folder / "config.yaml")
            whole = stored.epochs == self.settings.epochs and stored.steps == self.settings.steps
            changed = {change.key for change in config.changes(stored, self.settings)}
            moved = set(self.point) if (self.folder / SCORES).is_file() else set()
            if whole and changed <= moved:
                return FINISHED
        if (self.folder / "stopped.json").is_file():
            return STOPPED
        if self.error_file.is_file():
            return FAILED
        return PART if (self.folder / "config.yaml").is_file() else NEW


@dataclass(frozen=True)
class Sweep:
    """A space whose base, overrides, seeds and folder are settled."""

    space: Space
    base: str
    layer: Mapping[str, Any]  # what the base experiment's file says
    words: Mapping[str, str]  # settings of the sweep for this base, then the user's
    seeds: Sequence[int]
    storage: str  # absolute: workers may have another working folder
    command: str = ""
    points: Sequence[Point] | None = None  # None: the grid; else drawn (optuna: none beforehand)
    cases: Sequence[Case] = ()  # settings of some points; without what the user gave for all
    population: bool = False  # trials take over from each other (scheduler=pbt)

    @property
    def name(self) -> str:
        """Name of the sweep's folder and tables; another base has its own."""
        if self.base == self.space.base:
            return self.space.name
        return f"{self.space.name}-{config.experiment_title(self.base)}"

    @property
    def given(self) -> dict[str, str]:
        """The user's settings, without those that the sweep has for this base anyway."""
        own = suited(self.space, self.base).settings
        return {k: v for k, v in self.words.items() if k not in own or show(own[k]) != v}

    @property
    def folder(self) -> Path:
        """Holds the run folders."""
        return Path(self.storage) / self.name

    @property
    def epochs(self) -> int:
        """The most epochs that a trial can have, also where the trials are not known ahead."""
        axes = [grid["epochs"] for grid in self.space.grids if "epochs" in grid]
        ends = [e for a in axes for e in (a if isinstance(a, list) else next(iter(a.values())))]
        said = ends or [self.words.get("epochs", self.layer.get("epochs", Settings().epochs))]
        said += [case.settings["epochs"] for case in self.cases if "epochs" in case.settings]
        try:
            return max(map(int, said))
        except ValueError as e:
            raise UserError(f"epochs={said[0]}: must be a whole number") from e

    def trial(self, point: Point, seed: int) -> Trial:
        """The run of a setting and a seed; a setting that makes no sense is a UserError."""
        extra = {
            k: show(v) for case in self.cases if case.fits(point) for k, v in case.settings.items()
        }
        values = {
            **self.words,
            **extra,
            **{k: show(v) for k, v in point.items()},
            "seed": str(seed),
        }
        words = [f"{k}={v}" for k, v in values.items()]
        base = ("", OmegaConf.create(dict(self.layer)))
        try:
            merged = config.merge(Settings, base, ("", config.parse_overrides(words)))
            settings = methods.checked(cast(Settings, merged))
        except UserError as e:
            text = " ".join(f"{k}={show(v)}" for k, v in point.items())
            raise UserError(f"sweep={self.space.name} base={self.base}, {text}: {e}") from e
        settings.experiment = self.base
        brief = [f"{k.rpartition('.')[2]}_{show(v)}" for k, v in point.items()]
        protocol = digest(settings, leave_out={*point, "seed"}, beside=self.case_text)
        kind = ["pbt"] if self.population else []
        settings.name = "-".join([*brief, f"s{seed}", digest(settings), *kind]).replace("/", "_")
        settings.out = str(self.folder)
        command = shlex.join(
            ["python", "-m", "treeprop_ray.train", f"experiment={self.base}", *words]
        )
        return Trial(point, seed, settings, command, protocol)

    @property
    def case_keys(self) -> list[str]:
        """Settings that depend on the point without being an axis."""
        return list(dict.fromkeys(key for case in self.cases for key in case.settings))

    @property
    def case_text(self) -> dict[str, str]:
        """The cases, and what holds where none of them does; empty without cases."""
        base = OmegaConf.create(dict(self.layer))
        usual = {k: self.words.get(k, show(OmegaConf.select(base, k))) for k in self.case_keys}
        kind = {"scheduler": "pbt"} if self.population else {}
        return {**usual, **{str(c.where): str(c.settings) for c in self.cases}, **kind}

    def all_points(self) -> list[Point]:
        """All settings that are known beforehand; an open-ended search knows none."""
        return list(grid_points(self.space)) if self.points is None else list(self.points)

    def trials(self) -> Iterator[Trial]:
        """All trials, seed by seed, so that the whole table fills up evenly."""
        points = self.all_points()
        for seed in self.seeds:
            for point in points:
                yield self.trial(point, seed)


def digest(
    settings: Settings, leave_out: Collection[str] = (), beside: Mapping[str, str] | None = None
) -> str:
    """Names what is computed. Only settings that are not at their default count, so that a
    setting which the program gains later changes no name. `beside` has its own text for keys."""
    beside = beside or {}
    default = {k: v for k, _, v in config.walk(Settings())}
    counted = {
        k: show(v)
        for k, _, v in config.walk(settings)
        if (k not in RESUMABLE or k in config.LENGTH)
        and k not in {*leave_out, *beside}
        and v != default[k]
    }
    text = json.dumps({**counted, **beside}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def resolve(
    sweep: str, base: str, overrides: Sequence[str], seeds: Any, storage: str, command: str = ""
) -> Sweep:
    """Settle a sweep: file, base, overrides (settings, or new values for an axis) and seeds."""
    space = load_space(sweep)
    base = base or space.base
    try:
        layer = OmegaConf.to_container(config.experiment_layer(base))
    except UserError as e:
        raise UserError(str(e).replace("experiment=", "base=")) from e
    file = cast("dict[str, Any]", layer)
    suit = suited(space, base)
    own = suit.grids or space.grids
    grids = [{key: suit.space.get(key, axis) for key, axis in grid.items()} for grid in own]
    words = {k: show(v) for k, v in suit.settings.items()}
    for word in overrides:
        key, _, text = word.partition("=")
        if key in TAKEN:
            raise UserError(f"{word}: not for a sweep; {TAKEN[key]}")
        if key in space.axes:
            grids = _narrow(grids, key, check_axis(key, _value(text)))
        else:
            words[key] = text
    given = {word.partition("=")[0] for word in overrides}
    chosen = list(space.seeds) if seeds is None else check_seeds("seeds", seeds)
    space = replace(space, grids=grids, written=own)
    storage = str(Path(storage).absolute())
    return Sweep(space, base, file, words, chosen, storage, command, cases=_left(suit.cases, given))


def _left(cases: Sequence[Case], given: Collection[str]) -> list[Case]:
    """Cases without the settings that the user gave, which are for all points."""
    left = [
        Case(case.where, {k: v for k, v in case.settings.items() if k not in given})
        for case in cases
    ]
    return [case for case in left if case.settings]


def suited(space: Space, base: str) -> Base:
    """What a base needs to suit a sweep; a+b needs what a does, unless the sweep names it."""
    title = config.experiment_title(base)
    return space.bases.get(title) or space.bases.get(title.partition("+")[0], Base())


def _narrow(grids: list[dict[str, Axis]], key: str, values: Axis) -> list[dict[str, Axis]]:
    """New values for an axis; where the grids of a union differ in it, each keeps its own."""
    if all(grid[key] == grids[0][key] for grid in grids):
        return [{**grid, key: values} for grid in grids]
    wanted = {show(v) for v in values}
    kept = [{**grid, key: [v for v in grid[key] if show(v) in wanted]} for grid in grids]
    if not any(grid[key] for grid in kept):
        have = ", ".join(show(v) for grid in grids for v in grid[key])
        raise UserError(f"{key}={values}: some of {have}")
    return [grid for grid in kept if grid[key]]


def _value(text: str) -> Any:
    """What the text of an override stands for: a number, a list, …"""
    parsed = OmegaConf.to_container(config.parse_overrides([f"value={text}"]))
    assert isinstance(parsed, dict)
    return parsed["value"]


def past_trials(sweep: Sweep) -> list[Trial]:
    """Trials of an open-ended search that have a run folder, with the same base and overrides."""
    trials = []
    for path in sorted(sweep.folder.glob("*/config.yaml")):
        stored = {k: v for k, _, v in config.walk(config.load_file(path))}
        point = {k: stored[k] for k in sweep.space.axes}
        if stored["seed"] == sweep.seeds[0]:
            trial = sweep.trial(point, stored["seed"])
            if trial.folder == path.parent:
                trials.append(trial)
    return trials


def read_json(path: Path) -> dict[str, Any] | None:
    """A mapping of a JSON file, or None where there is none; one that is damaged is said."""
    if not path.is_file():
        return None
    try:
        is_summary = path.name == "summary.json"
        found = read_summary(path.parent, *COUNTED) if is_summary else files.read_json(path)
    except UserError as e:
        warn(str(e))
        return None
    return found if isinstance(found, dict) else None
