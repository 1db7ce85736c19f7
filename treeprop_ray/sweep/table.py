"""From rows to a report's text. A pure function of the CSV and the sweep's YAML: no run folder."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeprop_ray.reporting.tables import markdown
from treeprop_ray.sweep import ranking
from treeprop_ray.sweep.plan import FAILED, FINISHED, STOPPED, Sweep
from treeprop_ray.sweep.rows import Row, figure, value_of
from treeprop_ray.sweep.space import VALUE, Paper, Point, Space, same, short, show
from treeprop_ray.sweep.view import clock
from treeprop_ray.sweep.wording import epochs_text, metric_text, metrics_text

NOT_RUN, NO_CELL = "not run", "-"
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Section:
    """Runs that differ in the axes and the seed only, and the settings that belong to the table."""

    sweep: Sweep
    commands: Sequence[str]
    expected: Sequence[tuple[Point, set[int]]]  # settings and the seeds asked for
    rows: Sequence[Row]

    @property
    def space(self) -> Space:
        """The sweep's file."""
        return self.sweep.space

    @property
    def is_search(self) -> bool:
        """Whether the settings were drawn or chosen, or changed on the way: not those of a grid."""
        return self.sweep.points is not None or self.sweep.population

    def at(self, point: Point) -> list[Row]:
        """The runs of a setting."""
        return [r for r in self.rows if all(same(r.get(k), v) for k, v in point.items())]

    def values(self, point: Point, metric: str) -> list[float]:
        """The figures of a setting's finished runs, by seed."""
        done = [r for r in self.at(point) if r["status"] == FINISHED]
        values = [value_of(metric, r) for r in sorted(done, key=lambda r: int(r["seed"]))]
        return [v for v in values if v is not None]

    def cell(self, point: Point, metric: str) -> str:
        """Mean ± sample standard deviation; how many seeds, when some are missing."""
        seeds = next(seeds for p, seeds in self.expected if p == point)
        runs, values = self.at(point), self.values(point, metric)
        if not runs:
            return NOT_RUN
        if not values:
            if any(r["status"] == FINISHED for r in runs):
                return NO_CELL  # this method has no such figure
            if any(r["status"] == FAILED for r in runs):
                return FAILED
            last = max(runs, key=lambda r: float(r["epochs"]))
            return ranking.stopped_text(ranking.validation_metric(self.space), last)
        text = figure(metric, statistics.mean(values))
        if len(values) > 1:
            text += f" ± {figure(metric, statistics.stdev(values))}"
        if len(values) < len(seeds):
            text += f" ({len(values)} of {len(seeds)} seeds)"
        return text


def sections(rows: Sequence[Row], resolve: Callable[[str], Sweep]) -> list[Section]:
    """Rows by protocol; `resolve` makes a sweep of the tune command that a row names."""
    protocols: dict[str, list[Row]] = {}
    for row in rows:
        protocols.setdefault(row["protocol"], []).append(row)
    out = []
    for group in protocols.values():
        commands = list(dict.fromkeys(row["sweep_command"] for row in group))
        sweeps = [resolve(command) for command in commands]
        expected: list[tuple[Point, set[int]]] = []
        for sweep in sweeps:
            for point in sweep.all_points() or _points_of(group, sweep.space):
                known = [seeds for p, seeds in expected if p == point]
                if known:
                    known[0].update(sweep.seeds)
                else:
                    expected.append((point, set(sweep.seeds)))
        out.append(Section(sweeps[-1], commands, expected, group))
    return out


def _points_of(rows: Sequence[Row], space: Space) -> list[Point]:
    """An open-ended search: the settings that were tried."""
    tried = {tuple(row[k] for k in space.axes): None for row in rows}
    return [dict(zip(space.axes, map(_number, values), strict=True)) for values in tried]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def grid(section: Section) -> tuple[list[Key], list[Key], dict[tuple[Key, Key], tuple[Point, str]]]:
    """Keys of the rows and of the columns, and the (setting, metric) of each cell."""
    table = section.space.table
    cells: dict[tuple[Key, Key], tuple[Point, str]] = {}
    for point, _ in section.expected:
        for label, metric in table.values.items():
            full = {**point, VALUE: label}
            key = tuple(full[k] for k in table.rows), tuple(full[k] for k in table.columns)
            cells[key] = (point, metric)
    rows = sorted(dict.fromkeys(row for row, _ in cells), key=_place(section, table.rows))
    columns = sorted(dict.fromkeys(c for _, c in cells), key=_place(section, table.columns))
    return rows, columns, cells


def _place(section: Section, axes: Sequence[str]) -> Callable[[Key], list[int]]:
    """Sorts by the order of the values in the sweep's file, also where some are excluded."""
    orders = []
    for axis in axes:
        grids = (*section.space.written, *section.space.grids)
        known = [v for g in grids if isinstance(vs := g.get(axis), list) for v in vs]
        known += [point[axis] for point, _ in section.expected if axis in point]
        labels = list(section.space.table.values) if axis == VALUE else known
        orders.append(list(dict.fromkeys(show(v) for v in labels)))
    return lambda key: [order.index(show(v)) for order, v in zip(orders, key, strict=True)]


def paper_of(section: Section) -> Paper | None:
    """The paper's figures for this base; else its first ones, to compare the pattern."""
    papers, base = section.space.paper, section.sweep.base
    twins = (base, base.removesuffix("_small"))  # a small twin is compared with the large one
    return next((p for p in papers if p.base in twins), papers[0] if papers else None)


def table_of(section: Section) -> str:
    """The table, laid out as the sweep says, with the paper's figures in columns of their own."""
    if section.is_search:
        return markdown(ranking.lines(section))
    space, layout = section.space, section.space.table
    rows, columns, cells = grid(section)
    paper, single = paper_of(section), len(layout.values) == 1

    def heading(column: Key, bare: bool = single and len(layout.columns) > 1) -> str:
        pairs = zip(layout.columns, column, strict=True)
        return ", ".join(
            str(v) if k == VALUE else space.label(k, v)
            for k, v in pairs
            if not (k == VALUE and bare)
        )

    def quoted(row: Key, column: Key) -> tuple[str, str]:
        """Heading and figure; one that is given for all values stands beside the first of them."""
        pairs = [*zip(layout.rows, row, strict=True), *zip(layout.columns, column, strict=True)]
        if paper and (quote := paper.cell([v for _, v in pairs])):
            return heading(column), quote
        keys = [v for k, v in pairs if k != VALUE]
        first = (VALUE, next(iter(layout.values))) in pairs
        bare = len(layout.columns) > 1 or not single
        return heading(column, bare), paper.cell(keys) if paper and first else ""

    lines: list[dict[str, str]] = []
    for row in rows:
        line: dict[str, str] = {}
        for key, value in zip(layout.rows, row, strict=True):
            line[space.label(key) if key != VALUE else ""] = (
                str(value) if key == VALUE else _value_label(space, key, value)
            )
        for column in columns:
            cell = cells.get((row, column))
            line[heading(column)] = section.cell(*cell) if cell else NO_CELL
            if names := [name for name, figure in (quoted(r, column) for r in rows) if figure]:
                line[", ".join(["paper", *filter(None, names[:1])])] = (
                    quoted(row, column)[1] or NO_CELL
                )
        lines.append(line)
    shown = {c: {line[c] for line in lines} for c in lines[0]}
    empty = {c for c, texts in shown.items() if NO_CELL in texts <= {NO_CELL, NOT_RUN}}
    return markdown([{k: v for k, v in line.items() if k not in empty} for line in lines])


def _value_label(space: Space, key: str, value: Any) -> str:
    """A value in a row: its own name if it has one, else the bare value."""
    return space.label(key, value) if isinstance(space.labels.get(key), Mapping) else show(value)


def report_of(name: str, parts: Sequence[Section]) -> str:
    """The whole report as markdown."""
    space = parts[0].space
    base = parts[0].sweep.base
    title = space.title if base == space.base else f"{space.title} (base {base})"
    lines = [f"# {title}", "", *([space.about, ""] if space.about else [])]
    for section in parts:
        lines += [f"## {_heading(section)}", "", table_of(section), ""]
        lines += [*_notes(section), ""]
    if space.figure or any(section.is_search for section in parts):
        lines += [f"![{space.title}]({name}.png)", ""]
    lines.append(f"Every run with its command, commit and figures: [{name}.csv]({name}.csv).")
    return "\n".join(lines) + "\n"


def _heading(section: Section) -> str:
    """Epochs, base and what the command set besides: it tells the sections of a page apart."""
    epochs = ", ".join(_distinct(section, "epochs", FINISHED)) or "no"
    given = [f"{k}={v}" for k, v in section.sweep.given.items() if k != "epochs"]
    return ", ".join([epochs_text(epochs), f"base {section.sweep.base}", *given])


def _notes(section: Section) -> list[str]:
    space, finished = section.space, [r for r in section.rows if r["status"] == FINISHED]
    wanted = sum(len(seeds) for _, seeds in section.expected)
    shown = [
        m for m in space.table.values.values() if any(value_of(m, r) is not None for r in finished)
    ]
    metrics = metrics_text(shown or list(space.table.values.values()))
    notes = [f"{metrics}; {_spread(section)}. {len(finished)} of {wanted} runs."]
    paper = paper_of(section)
    if paper and "| paper" in table_of(section):
        other = paper.base and paper.base != section.sweep.base
        notes.append(
            f"Paper: {paper.about}."
            + (" Other data and network than ours: compare the pattern." if other else "")
        )
    if section.is_search and len(section.expected) > ranking.LONGEST:
        notes.append(f"The best {ranking.LONGEST} of {len(section.expected)} settings.")
    if stopped := [r for r in section.rows if r["status"] == STOPPED]:
        notes.append(f"{len(stopped)} of {len(section.rows)} runs were stopped by the scheduler.")
    notes += [best_of(section)]
    for row in section.rows:
        if row["status"] == FAILED:
            notes.append(f"Failed: {row['run']}: {row['error']}.")
    if finished:
        seconds = sum(float(r["wall_seconds"]) for r in finished)
        dates = sorted(r["date"][:16].replace("T", " ") for r in finished)
        when = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
        commits = ", ".join(_distinct(section, "commit", FINISHED))
        hardware = " and ".join(
            dict.fromkeys(
                f"{r['cores']} cores, {r['cpu']}" + (f", {r['gpus']}" if "gpus" in r else "")
                for r in finished
            )
        )
        if settings := _settings(section, finished[0]):
            notes.append(f"Settings besides the base's: {settings}.")
        notes.append(f"Data: {', '.join(_distinct(section, 'data', FINISHED))}. "
                     f"Training time of all runs together {clock(seconds)}.")  # fmt: skip
        torch, ray = (", ".join(_distinct(section, k, FINISHED)) for k in ("torch", "ray"))
        notes.append(f"Commit {commits}, {when} UTC, {hardware}, torch {torch}, ray {ray}.")
    notes += [f"Command: `{command}`" for command in section.commands]
    return [f"{note}  " for note in notes]


def _spread(section: Section) -> str:
    """What a cell is: one run, a mean, or one here and the other there."""
    asked = {tuple(sorted(seeds)) for _, seeds in section.expected}
    texts = []
    for seeds in sorted(asked, key=lambda seeds: (len(seeds), seeds)):
        kind = "one run, seed" if len(seeds) == 1 else "mean ± sample standard deviation over seeds"
        texts.append(f"{kind} {', '.join(map(str, seeds))}")
    return ", or ".join(texts)


def _settings(section: Section, row: Row) -> str:
    """What the runs of a section have in common beyond the base experiment's file."""
    sweep = section.sweep
    known = {"experiment", "seed", "log_every", *section.space.axes, *sweep.case_keys}
    words = shlex.split(row["command"])[3:]  # python -m treeprop_ray.train
    usual = [w for w in words if w.partition("=")[0] not in known]
    usual += [f"{k}={v}" for k, v in sweep.words.items() if k in sweep.case_keys]
    texts = [" ".join(f"`{w}`" for w in usual)]
    for case in sweep.cases:
        where = " and ".join(f"{k}={' or '.join(map(show, vs))}" for k, vs in case.where.items())
        texts.append(f"{where}: " + " ".join(f"`{k}={show(v)}`" for k, v in case.settings.items()))
    return "; ".join(filter(None, texts))


def _distinct(section: Section, key: str, status: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in section.rows if r["status"] == status))


def best_of(section: Section) -> str:
    """The best setting, by its validation score: the test split must not choose."""
    metric, ranked = ranking.validation_metric(section.space), ranking.ranking(section)
    if not ranked or ranked[0].state != FINISHED:
        return f"best: no setting has a {metric_text(metric)} yet"
    point = ranked[0].point
    text = " ".join(f"{k}={short(v)}" for k, v in point.items())
    row = next(r for r in section.at(point) if r["status"] == FINISHED)
    command = row["sweep_command" if section.sweep.population else "command"]
    return f"best: {text}, {metric_text(metric)} {section.cell(point, metric)}, `{command}`"
