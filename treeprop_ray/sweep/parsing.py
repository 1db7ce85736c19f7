"""Reading a sweep's YAML: every key, axis and setting is checked, a mistake names the file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from treeprop_ray.config import Settings, read_yaml, spaces, walk
from treeprop_ray.errors import UserError
from treeprop_ray.sweep.space import (
    FIGURES,
    KINDS,
    LOWER,
    OTHERS,
    RANGES,
    SPLITS,
    VALUE,
    Axis,
    Base,
    Case,
    Figure,
    Paper,
    Space,
    Table,
    show,
)


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
    grids = _grids(source, "space", given)
    bases = {
        str(base): _base(source, f"bases.{base}", parts or {}, list(grids[0]))
        for base, parts in (loaded.get("bases") or {}).items()
    }
    metric = str(loaded.get("metric", "test/full/accuracy"))
    check_metric(source, "metric", metric)
    mode = loaded.get("mode", "min" if metric.rpartition("/")[2] in LOWER else "max")
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


def _grids(
    source: str, where: str, given: Sequence[Any], axes: Sequence[str] = ()
) -> list[dict[str, Axis]]:
    """Grids over the same axes, in the same order: it names the runs."""
    grids = [_axes(source, where, grid) for grid in given]
    axes = axes or list(grids[0])
    if any(grid.keys() != set(axes) for grid in grids):
        raise UserError(f"{source}: {where}: all grids need the same keys: {', '.join(axes)}")
    return [{key: grid[key] for key in axes} for grid in grids]


def _base(source: str, where: str, given: Mapping[Any, Any], axes: Sequence[str]) -> Base:
    _only(source, f"{where}.", given, {"settings", "space", "cases"})
    settings, space = given.get("settings") or {}, given.get("space") or {}
    _settings_keys(source, f"{where}.settings", settings)
    cases = [_case(source, f"{where}.cases", case, axes) for case in given.get("cases") or ()]
    if isinstance(space, list):
        return Base(settings, grids=_grids(source, f"{where}.space", space, axes), cases=cases)
    return Base(settings, _axes(source, f"{where}.space", space), cases=cases)


def _case(source: str, where: str, given: Any, axes: Sequence[str]) -> Case:
    _only(source, f"{where}.", given, {"where", "settings"})
    values, settings = _axes(source, f"{where}.where", given.get("where")), given.get("settings")
    for key, axis in values.items():
        if key not in axes:
            raise UserError(f"{source}: {where}.where: {key} is no axis; axes: {', '.join(axes)}")
        if isinstance(axis, dict):
            raise UserError(f"{source}: {where}.where: {key}={axis}: a value, or a list of values")
    if not settings or not isinstance(settings, Mapping):
        raise UserError(f"{source}: {where}.settings={settings}: must hold key: value lines")
    _settings_keys(source, f"{where}.settings", settings)
    for key in settings:
        if key in axes:
            raise UserError(f"{source}: {where}.settings: {key} is an axis of the sweep")
    return Case({k: list(v) for k, v in values.items()}, settings)


def check_seeds(what: str, given: Any) -> list[int]:
    """A list of different seeds."""
    values = given if isinstance(given, list) else [given]
    whole = all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in values)
    if not values or not whole or len(set(values)) < len(values):
        raise UserError(f"{what}={given}: a list of different whole numbers, e.g. [1,2,3]")
    return list(values)


def check_metric(source: str, key: str, metric: str) -> None:
    """Raise UserError for what is no figure of a run."""
    split, _, rest = metric.partition("/")
    kind = rest.rpartition("/")[2]
    if metric in OTHERS or (metric.count("/") == 2 and split in SPLITS and kind in KINDS):
        return
    raise UserError(
        f"{source}: {key}={metric}: must be <{'|'.join(SPLITS)}>/<path>/<{'|'.join(KINDS)}>, or "
        f"one of {', '.join(OTHERS)}"
    )


def _table(source: str, given: Mapping[str, Any], axes: Sequence[str], metric: str) -> Table:
    _only(source, "table.", given, {"rows", "columns", "values"})
    values = given.get("values") or {metric: metric}
    for label, shown in values.items():
        check_metric(source, f"table.values.{label}", str(shown))
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
    if made.kind == "panels":
        if made.x or made.y or made.series:
            raise UserError(f"{source}: figure: panels are for all axes; no x, y or series")
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
