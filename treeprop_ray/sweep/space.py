"""A sweep's YAML: base experiment, axes, seeds, metric, table layout, the paper's figures.

    title: …                          one line
    about: …                          what is varied and why, for the report; `|` keeps paragraphs
    base: digits                      the experiment behind every trial
    bases:                            what a base needs to suit this sweep; `base=` picks another
      digits: {settings: {epochs: 10}, space: {time.depth: [4, 5]}}
    space: {alpha: [0, 0.5, 1]}       axes; a list of such mappings is a union of grids
    exclude: [{alpha: 0, beta: 0}]    settings that are left out
    seeds: [1, 2, 3]
    metric: test/full/accuracy        <split>/<path>/<accuracy|loss|perplexity>, leak,
                                      work or critical_path; spine is the longest spine path;
                                      best/full/… is of the test split, at the best validation
                                      epoch; with eval_test=true also highest/full/…, the best test
                                      score, and late/full/…, the mean of the last ten epochs
    mode: max
    table: {rows: [alpha], columns: [beta], values: {accuracy: test/full/accuracy}}
    labels: {alpha: α}                how keys (or key: {value: text}) are shown
    figure: {kind: heatmap, x: beta, y: alpha}
    paper: [{about: …, base: cifar10_vit, cells: {0.5: {0: 87.92 ± 0.44}}}]   rows, then columns

With search=random or optuna an axis may also be a range: `lr: {loguniform: [1e-4, 1e-2]}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from treeprop_ray.config import Settings, read_yaml, spaces, walk
from treeprop_ray.errors import UserError

RANGES = ("uniform", "loguniform", "randint")
FIGURES = ("heatmap", "curve", "bars", "scatter")
VALUE = "value"  # the axis of a table that runs over its metrics

Axis = list[Any] | dict[str, list[Any]]  # values, or a range such as {uniform: [0, 1]}
Point = Mapping[str, Any]  # a value for each axis


@dataclass(frozen=True)
class Base:
    """What a base experiment needs to suit the sweep."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, Axis] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Axes that make the rows and the columns, and the metrics shown (label -> metric)."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Mapping[str, str]


@dataclass(frozen=True)
class Figure:
    """heatmap: x, y; curve and bars: x, and a line or bar for each setting of the axes `series`;
    scatter: every setting by two metrics, x and y."""

    kind: str
    x: str
    y: str = ""
    series: Sequence[str] = ()
    scale: str = "linear"  # of x: linear, or symlog where 0 is among powers of ten


@dataclass(frozen=True)
class Paper:
    """Figures of the paper: nested by the values of the rows, then of the columns."""

    about: str
    cells: Mapping[Any, Any]
    base: str = ""

    def cell(self, keys: Sequence[Any]) -> str:
        """The figure at the values of rows and columns, or nothing."""
        found: Any = self.cells
        for key in keys:
            if not isinstance(found, Mapping):
                return ""
            found = {show(k): v for k, v in found.items()}.get(show(key))
        return "" if found is None or isinstance(found, Mapping) else str(found)


@dataclass(frozen=True)
class Space:
    """A sweep as its file says it."""

    name: str
    title: str
    base: str
    grids: Sequence[Mapping[str, Axis]]
    table: Table
    about: str = ""
    bases: Mapping[str, Base] = field(default_factory=dict)
    exclude: Sequence[Point] = ()
    seeds: Sequence[int] = (1,)
    metric: str = "test/full/accuracy"
    mode: str = "max"
    labels: Mapping[str, Any] = field(default_factory=dict)
    figure: Figure | None = None
    paper: Sequence[Paper] = ()
    written: Sequence[Mapping[str, Axis]] = ()  # grids of the file, where `grids` are a command's

    @property
    def axes(self) -> list[str]:
        """All keys that vary, in the order of the file."""
        return list(self.grids[0])

    def excluded(self, point: Point) -> bool:
        """Whether a setting is one that the sweep leaves out."""
        return any(all(same(point.get(k), v) for k, v in bad.items()) for bad in self.exclude)

    def label(self, key: str, value: Any = None) -> str:
        """How a key, or a key's value, is shown in tables."""
        given = self.labels.get(key)
        if value is None:
            return given if isinstance(given, str) else key.rpartition(".")[2]
        if isinstance(given, Mapping):
            named = {show(k): str(v) for k, v in given.items()}
            if show(value) in named:
                return named[show(value)]
        return f"{self.label(key)}={show(value)}"


def same(a: Any, b: Any) -> bool:
    """Whether two settings' values are the same: 0 and 0.0 are."""
    return show(a) == show(b)


def show(value: Any) -> str:
    """A value as the command line takes it: 0.001, true, 8."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return "null" if value is None else str(value)


def load_space(name: str) -> Space:
    """A shipped sweep by its name, or the user's own by its path."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else spaces.folder() / f"{name}.yaml"
    if not path.is_file():
        raise UserError(
            f"sweep={name}: one of {', '.join(spaces.shipped())}, or a path of a file that ends "
            "in .yaml"
        )
    loaded = OmegaConf.to_container(read_yaml(path, f"sweep={name}"))
    assert isinstance(loaded, dict)
    return parse(path.stem, path.name, loaded)


def parse(name: str, source: str, loaded: Mapping[Any, Any]) -> Space:
    """Check what a file says and make a Space of it."""

    def bad(text: str) -> UserError:
        return UserError(f"{source}: {text}")

    known = {
        "title", "about", "base", "bases", "space", "exclude", "seeds", "metric", "mode", "table",
        "labels", "figure", "paper",
    }  # fmt: skip
    _only(source, "", loaded, known)
    for key in ("base", "space"):
        if not loaded.get(key):
            raise bad(f"{key} is missing")
    given = loaded["space"] if isinstance(loaded["space"], list) else [loaded["space"]]
    grids = [_axes(source, "space", grid) for grid in given]
    if any(grid.keys() != grids[0].keys() for grid in grids):
        raise bad("space: all grids need the same keys")
    grids = [{key: grid[key] for key in grids[0]} for grid in grids]  # the order names the runs
    bases = {}
    for base, parts in (loaded.get("bases") or {}).items():
        _only(source, f"bases.{base}.", parts or {}, {"settings", "space"})
        parts = parts or {}
        extra = _axes(source, f"bases.{base}.space", parts.get("space") or {})
        settings = parts.get("settings") or {}
        _settings_keys(source, f"bases.{base}.settings", settings)
        bases[str(base)] = Base(settings, extra)
    metric, mode = loaded.get("metric", "test/full/accuracy"), loaded.get("mode", "max")
    if mode not in ("max", "min"):
        raise bad(f"mode={mode}: one of max, min")
    seeds = check_seeds(f"{source}: seeds", loaded.get("seeds", [1]))
    table = _table(source, loaded.get("table") or {}, list(grids[0]), metric)
    figure = _figure(source, loaded["figure"], list(grids[0])) if loaded.get("figure") else None
    papers = []
    for entry in loaded.get("paper") or ():
        _only(source, "paper.", entry, {"about", "base", "cells"})
        papers.append(Paper(**entry))
    exclude = [dict(e) for e in loaded.get("exclude") or ()]
    return Space(
        name=name,
        title=loaded.get("title", name),
        about="\n\n".join(" ".join(p.split()) for p in str(loaded.get("about", "")).split("\n\n")),
        base=str(loaded["base"]),
        bases=bases,
        grids=grids,
        exclude=exclude,
        seeds=seeds,
        metric=metric,
        mode=mode,
        table=table,
        labels=loaded.get("labels") or {},
        figure=figure,
        paper=papers,
    )


def check_seeds(what: str, given: Any) -> list[int]:
    """A list of different seeds."""
    values = given if isinstance(given, list) else [given]
    whole = all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in values)
    if not values or not whole or len(set(values)) < len(values):
        raise UserError(f"{what}={given}: a list of different whole numbers, e.g. [1,2,3]")
    return list(values)


def _table(source: str, given: Mapping[str, Any], axes: Sequence[str], metric: str) -> Table:
    _only(source, "table.", given, {"rows", "columns", "values"})
    values = given.get("values") or {metric: metric}
    rows = list(given.get("rows") or axes)
    columns = list(given.get("columns") or ())
    if VALUE not in (*rows, *columns):
        columns.append(VALUE)
    for key in (*rows, *columns):
        if key not in (*axes, VALUE):
            raise UserError(f"{source}: table: {key} is no axis; axes: {', '.join(axes)}")
    missing = [key for key in axes if key not in (*rows, *columns)]
    if missing:
        raise UserError(f"{source}: table: {', '.join(missing)} is in neither rows nor columns")
    return Table(rows, columns, values)


def _figure(source: str, given: Mapping[str, Any], axes: Sequence[str]) -> Figure:
    _only(source, "figure.", given, {"kind", "x", "y", "series", "scale"})
    series = given.get("series") or []
    made = Figure(**{**given, "series": series if isinstance(series, list) else [series]})
    if made.kind not in FIGURES:
        raise UserError(f"{source}: figure.kind={made.kind}: one of {', '.join(FIGURES)}")
    if made.kind == "scatter":
        if not made.x or not made.y or made.series:
            raise UserError(f"{source}: figure: a scatter has two metrics, x and y, and no series")
        return made
    used = {made.x, made.y, *made.series} - {"", VALUE}
    if used != set(axes):
        raise UserError(
            f"{source}: figure: x, y and series must be the axes {', '.join(axes)}; got "
            f"{', '.join(sorted(used))}"
        )
    return made


def _only(source: str, prefix: str, given: Any, known: set[str]) -> None:
    if not isinstance(given, Mapping):
        raise UserError(f"{source}: {prefix.rstrip('.')}={given}: must hold key: value lines")
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(known))}"
            raise UserError(f"{source}: unknown key {prefix}{key}; {hint}")


def _axes(source: str, where: str, given: Any) -> dict[str, Axis]:
    if not isinstance(given, Mapping):
        raise UserError(f"{source}: {where}={given}: must hold key: [values] lines")
    _settings_keys(source, where, given)
    return {str(key): check_axis(f"{source}: {key}", axis) for key, axis in given.items()}


def _settings_keys(source: str, where: str, given: Mapping[Any, Any]) -> None:
    known = [key for key, _, _ in walk(Settings())]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{source}: {where}: {key} is no setting of train{hint}")


def check_axis(what: str, axis: Any) -> Axis:
    """The values of an axis, or a range."""
    if isinstance(axis, Mapping):
        kind = next(iter(axis), "")
        ends = axis.get(kind)
        if len(axis) == 1 and kind in RANGES and isinstance(ends, list) and len(ends) == 2:
            return {str(kind): ends}
        raise UserError(f"{what}={dict(axis)}: a list, or one of {', '.join(RANGES)} with two ends")
    values = list(axis) if isinstance(axis, list) else [axis]
    if not values or len({show(v) for v in values}) < len(values):
        raise UserError(f"{what}={axis}: needs different values, at least one")
    return values


def grid_points(space: Space) -> Iterator[Point]:
    """Every setting of the grids that is not excluded, in the order of the file."""
    for grid in space.grids:
        for key, axis in grid.items():
            if isinstance(axis, dict):
                raise UserError(f"{key}={axis}: a range needs search=random or search=optuna")
        for values in product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            if not space.excluded(point):
                yield point
