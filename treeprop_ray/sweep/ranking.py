"""Settings of a search as a list, the best first: a table by axes would be a diagonal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeprop_ray.sweep.plan import FAILED, FINISHED, STOPPED
from treeprop_ray.sweep.rows import Row, figure, value_of
from treeprop_ray.sweep.space import Point, Space, short

if TYPE_CHECKING:
    from treeprop_ray.sweep.table import Section

LONGEST = 30  # lines of a list; the CSV has all


@dataclass(frozen=True)
class Ranked:
    """A setting and how far it came."""

    point: Point
    state: str  # finished, stopped, failed or not run
    score: float | None  # on the validation split
    epoch: str = ""  # at which a scheduler stopped it


def validation_metric(space: Space) -> str:
    """What settings are compared by: the sweep's metric, on the validation split."""
    whole = space.metric.count("/") == 2
    return f"validation/{space.metric.partition('/')[2]}" if whole else space.metric


def ranking(section: Section) -> list[Ranked]:
    """All settings: finished ones by score, those stopped the latest, the failed, those not run."""
    metric = validation_metric(section.space)
    ranked = [_ranked(section, point, metric) for point, _ in section.expected]
    order = (FINISHED, STOPPED, FAILED)
    sign = -1 if section.space.mode == "max" else 1

    def place(one: Ranked) -> tuple[int, float, float]:
        rank = order.index(one.state) if one.state in order else len(order)
        score = sign * one.score if one.score is not None else float("inf")
        return rank, -float(one.epoch or 0), score

    return sorted(ranked, key=place)


def _ranked(section: Section, point: Point, metric: str) -> Ranked:
    rows = section.at(point)
    if values := section.values(point, metric):
        return Ranked(point, FINISHED, statistics.mean(values))
    if stopped := [row for row in rows if row["status"] == STOPPED]:
        last = max(stopped, key=lambda row: float(row["epochs"]))
        return Ranked(point, STOPPED, value_of(metric, last), last["epochs"])
    return Ranked(point, rows[0]["status"] if rows else "not run", None)


def stopped_text(metric: str, row: Row) -> str:
    """How the table tells of a trial that a scheduler ended."""
    value = value_of(metric, row)
    last = f", validation {figure(metric, value)}" if value is not None else ""
    return f"stopped at epoch {row['epochs']}{last}"


def lines(section: Section) -> list[Mapping[str, Any]]:
    """The best settings, a line each: its axes, the validation score, the table's own figures."""
    space, metric = section.space, validation_metric(section.space)
    shown = {label: m for label, m in space.table.values.items() if m != metric}
    out: list[Mapping[str, Any]] = []
    for number, one in enumerate(ranking(section)[:LONGEST], 1):
        axes = {space.label(key): short(value) for key, value in one.point.items()}
        figures = {label: section.cell(one.point, m) for label, m in shown.items()}
        if one.state == STOPPED:
            figures = dict.fromkeys(figures, "-")
        if section.sweep.population:
            stories = [row["population"] for row in section.at(one.point) if "population" in row]
            figures["took over"] = stories[0] if stories else "-"
        out.append({"#": number, **axes, "validation": section.cell(one.point, metric), **figures})
    return out
