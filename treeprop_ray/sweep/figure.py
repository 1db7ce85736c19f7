"""A sweep's figure: heat map, curves or bars, one panel for each group of comparable runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treeprop_ray.reporting.plot import label_points, plt, save
from treeprop_ray.sweep.plan import FINISHED
from treeprop_ray.sweep.ranking import ranking, validation_metric
from treeprop_ray.sweep.space import VALUE, Figure, show
from treeprop_ray.sweep.table import Section
from treeprop_ray.sweep.wording import EPOCHS, epochs_text, metric_text


def draw(sections: Sequence[Section], target: Path) -> bool:
    """Write the PNG; False when there is nothing to draw."""
    wanted = sections[0].space.figure
    if any(section.is_search for section in sections):
        wanted = Figure("panels")
    shown = [s for s in sections if any(r["status"] == "finished" for r in s.rows)]
    if wanted is None or not shown:
        return False
    if wanted.kind == "panels":
        return _panels(shown, target)
    fig, axes = plt.subplots(1, len(shown), figsize=(6.0 * len(shown), 4.2), squeeze=False)
    kinds = {"heatmap": _heatmap, "curve": _curve, "bars": _bars, "scatter": _scatter}
    for ax, section in zip(axes[0], shown, strict=True):
        kinds[wanted.kind](ax, section, wanted)
        epochs = next(r["epochs"] for r in section.rows if r["status"] == "finished")
        ax.set_title(f"{section.sweep.base}, {epochs_text(epochs)}")
    save(fig, target, metadata={"Software": None})
    return True


def _panels(sections: Sequence[Section], target: Path) -> bool:
    """A row for each group of runs, a panel for each axis: the validation score over its values."""
    axes = sections[0].space.axes
    fig, rows = plt.subplots(
        len(sections), len(axes), figsize=(3.2 * len(axes) + 0.8, 3.4 * len(sections)),
        squeeze=False, sharey="row",
    )  # fmt: skip
    for row, section in zip(rows, sections, strict=True):
        for ax, axis in zip(row, axes, strict=True):
            _panel(ax, section, axis)
        row[0].set_ylabel(metric_text(validation_metric(section.space)))
    save(fig, target, metadata={"Software": None})
    return True


def _panel(ax: Any, section: Section, axis: str) -> None:
    """Every setting by one axis: filled if it trained to the end, hollow if it was stopped."""
    scored = [one for one in ranking(section) if one.score is not None]
    factor = 100 if section.space.metric.endswith("/accuracy") else 1
    values = [one.point[axis] for one in scored]
    is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    names = list(dict.fromkeys(map(show, values)))
    places = values if is_number else [names.index(show(v)) for v in values]
    ys = [factor * one.score for one in scored if one.score is not None]
    finished = [one.state == FINISHED for one in scored]
    for done, face in ((True, "C0"), (False, "none")):
        at = [(x, y) for x, y, f in zip(places, ys, finished, strict=True) if f is done]
        if at:
            ax.scatter(*zip(*at, strict=True), facecolors=face, edgecolors="C0", s=22)
    ax.scatter(places[:1], ys[:1], marker="*", color="C3", s=110, zorder=3)  # the best
    if not is_number:
        ax.set_xticks(range(len(names)), names)
    elif min(values) > 0 and max(values) / min(values) > 20:
        ax.set_xscale("log")
    ax.set(xlabel=section.space.label(axis))
    ax.grid(alpha=0.3)


def _points(section: Section, wanted: Figure) -> dict[tuple[Any, tuple[Any, ...]], list[float]]:
    """(x, values of y or series) -> figures of all seeds there."""
    others = [wanted.y] if wanted.y else list(wanted.series)
    points: dict[tuple[Any, tuple[Any, ...]], list[float]] = {}
    for point, _ in section.expected:
        for label, metric in section.space.table.values.items():
            if VALUE not in (wanted.x, *others) and metric != section.space.metric:
                continue
            full = {**point, VALUE: label}
            factor = 100 if metric.endswith("/accuracy") else 1
            values = [factor * v for v in section.values(point, metric)]
            key = (full[wanted.x], tuple(full[k] for k in others))
            points.setdefault(key, []).extend(values)
    return points


def _text(section: Section, keys: Sequence[str], values: Sequence[Any]) -> str:
    pairs = zip(keys, values, strict=True)
    return ", ".join(str(v) if k == VALUE else section.space.label(k, v) for k, v in pairs)


def _what(section: Section, wanted: Figure) -> str:
    split, path, kind = section.space.metric.split("/")
    unit = " (%)" if kind == "accuracy" else ""
    of = "" if VALUE in (wanted.x, wanted.y, *wanted.series) else f" of {path}"
    split, when = EPOCHS.get(split, (split, ""))
    return f"{split} {kind}{unit}{of}{when}"


def _heatmap(ax: Any, section: Section, wanted: Figure) -> None:
    points = _points(section, wanted)
    xs, ys = sorted({x for x, _ in points}), sorted({y for _, (y,) in points})
    means = [[_mean(points.get((x, (y,)), [])) for x in xs] for y in ys]
    image = ax.imshow(means, origin="lower", cmap="viridis", aspect="auto")
    low, high = image.get_clim()
    for i, row in enumerate(means):
        for j, value in enumerate(row):
            run = value == value
            dark = run and value < (low + high) / 2
            text = f"{value:.2f}" if run else "-"
            ax.annotate(text, (j, i), ha="center", va="center", color="w" if dark else "k")
    ax.set_xticks(range(len(xs)), [show(x) for x in xs])
    ax.set_yticks(range(len(ys)), [show(y) for y in ys])
    ax.set(xlabel=section.space.label(wanted.x), ylabel=section.space.label(wanted.y))
    ax.figure.colorbar(image, ax=ax, label=_what(section, wanted))


def _curve(ax: Any, section: Section, wanted: Figure) -> None:
    points = _points(section, wanted)
    for series in dict.fromkeys(s for _, s in points):
        xs = [x for (x, s), values in points.items() if s == series and values]
        values = [points[x, series] for x in xs]
        ax.errorbar(
            xs, [_mean(v) for v in values], yerr=[_spread(v) for v in values],
            marker="o", capsize=3, label=_text(section, wanted.series, series),
        )  # fmt: skip
    if wanted.scale == "symlog":
        smallest = min(x for x, _ in points if x > 0)
        ax.set_xscale("symlog", linthresh=smallest)
    ax.set(xlabel=section.space.label(wanted.x), ylabel=_what(section, wanted))
    ax.grid(alpha=0.3)
    if wanted.series:
        ax.legend()


def _bars(ax: Any, section: Section, wanted: Figure) -> None:
    points = _points(section, wanted)
    xs, series = (list(dict.fromkeys(key[i] for key in points)) for i in (0, 1))
    width = 0.8 / len(series)
    for k, one in enumerate(series):
        values = [points.get((x, one), []) for x in xs]
        ax.bar(
            [i + (k - (len(series) - 1) / 2) * width for i in range(len(xs))],
            [_mean(v) for v in values], width, yerr=[_spread(v) for v in values],
            capsize=2, label=_text(section, wanted.series, one),
        )  # fmt: skip
    ax.set_xticks(range(len(xs)), [_text(section, [wanted.x], [x]) for x in xs])
    ax.set(ylabel=_what(section, wanted))
    ax.grid(alpha=0.3, axis="y")
    if wanted.series:
        ax.legend(fontsize=8)


def _scatter(ax: Any, section: Section, wanted: Figure) -> None:
    """Every setting by two metrics; its name holds the axes in which the settings differ."""
    points = [point for point, _ in section.expected]
    varied = [k for k in section.space.axes if len({show(p[k]) for p in points}) > 1]
    texts = []
    for point in points:
        x, y = (section.values(point, metric) for metric in (wanted.x, wanted.y))
        if not x or not y:
            continue
        at = (_mean(x), _mean(y))
        ax.errorbar(*at, yerr=_spread(y), marker="o", capsize=3)
        text = _text(section, varied, [point[k] for k in varied])
        texts.append((at, text))
    ax.set(xlabel=_metric(section, wanted.x), ylabel=_metric(section, wanted.y))
    ax.grid(alpha=0.3)
    label_points(ax, texts, fontsize=6)


def _metric(section: Section, metric: str) -> str:
    """What the table calls a metric."""
    names = section.space.table.values.items()
    return next((name for name, its in names if its == metric), metric)


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else float("nan")


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
