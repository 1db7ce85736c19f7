"""A sweep's YAML: base experiment, axes, seeds, metric, table layout, the paper's figures.

    title: …                          one line
    about: …                          what is varied and why, for the report; `|` keeps paragraphs
    base: digits                      the experiment behind every trial
    bases:                            what a base needs to suit this sweep; `base=` picks another
      digits: {settings: {epochs: 10}, space: {time.depth: [4, 5]}}
      cifar10_vit: {cases: [{where: {method: bp}, settings: {lr: 0.001}}]}
                                      `space` has new values for some axes, or (a list) all grids
                                      anew; `cases` are settings of some points only, which stand
                                      in one table with the others
    space: {alpha: [0, 0.5, 1]}       axes; a list of such mappings is a union of grids
    exclude: [{alpha: 0, beta: 0}]    settings that are left out
    seeds: [1, 2, 3]
    metric: test/full/accuracy        <split>/<path>/<accuracy|loss|perplexity>, leak,
                                      correction_ratio, parameters_deployed, work,
                                      critical_path or spine_layers; spine is the longest spine
                                      path;
                                      best/full/… is of the test split, at the best validation
                                      epoch; with eval_test=true also highest/full/…, the best test
                                      score, and late/full/…, the mean of the last ten epochs
    mode: max                         whether more is better; without it losses, perplexities and
                                      costs are min
    table: {rows: [alpha], columns: [beta], values: {accuracy: test/full/accuracy}}
    labels: {alpha: α}                how keys (or key: {value: text}) are shown
    figure: {kind: heatmap, x: beta, y: alpha}
    paper: [{about: …, base: cifar10_vit, cells: {0.5: {0: 87.92 ± 0.44}}}]   rows, then columns

With search=random or optuna an axis may also be a range: `lr: {loguniform: [1e-4, 1e-2]}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from treeprop_ray.errors import UserError

RANGES = ("uniform", "loguniform", "randint")
FIGURES = ("heatmap", "curve", "bars", "scatter", "panels")
SPLITS = (
    "validation",
    "test",
    "best",
    "highest",
    "late",
)  # of a metric, and when on the test split
KINDS = ("accuracy", "loss", "perplexity")
COSTS = ("parameters_deployed", "work", "critical_path", "spine_layers")
OTHERS = ("leak", "correction_ratio", *COSTS)  # metrics too
LOWER = ("loss", "perplexity", "leak", *COSTS)  # is better
VALUE = "value"  # the axis of a table that runs over its metrics

Axis = list[Any] | dict[str, list[Any]]  # values, or a range such as {uniform: [0, 1]}
Point = Mapping[str, Any]  # a value for each axis


@dataclass(frozen=True)
class Case:
    """Settings that go with some points: a method's own learning rate, say."""

    where: Mapping[str, Sequence[Any]]  # axis -> its values that this is for
    settings: Mapping[str, Any]

    def fits(self, point: Point) -> bool:
        """Whether a point is one of those."""
        return all(any(same(point.get(k), v) for v in vs) for k, vs in self.where.items())


@dataclass(frozen=True)
class Base:
    """What a base experiment needs to suit the sweep."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, Axis] = field(default_factory=dict)  # new values of some axes
    grids: Sequence[Mapping[str, Axis]] = ()  # in place of the sweep's own
    cases: Sequence[Case] = ()


@dataclass(frozen=True)
class Table:
    """Axes that make the rows and the columns, and the metrics shown (label -> metric)."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Mapping[str, str]


@dataclass(frozen=True)
class Figure:
    """heatmap: x, y; curve and bars: x, and a line or bar for each setting of the axes `series`;
    scatter: every setting by two metrics, x and y; panels: one for each axis, for any number of
    them, with the validation score of every setting."""

    kind: str
    x: str = ""
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


def short(value: Any) -> str:
    """A value for a reader: four digits are enough."""
    return f"{value:.4g}" if isinstance(value, float) else show(value)


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
