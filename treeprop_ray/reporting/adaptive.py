"""Adaptive inference as a figure, and as a page of results with the run's own command."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from treeprop_ray.errors import UserError
from treeprop_ray.reporting.plot import plt, save
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.run.folder import read_summary

TITLE = "Adaptive inference: samples stop on the spine when the softmax is confident"
# threshold, share of correct samples, mean blocks run, share of samples that leave at each exit
Outcome = tuple[float, float, float, tuple[float, ...]]


def show(
    run: str,
    out: str,
    split: str,
    outcomes: Sequence[Outcome],
    fixed: Mapping[str, tuple[int, float]],
) -> Path:
    """Draw figures/adaptive.png of a run, with `out` the page there too; returns the figure.

    `fixed`: (blocks, accuracy) of every exit's path on its own.
    """
    figure = Path(run) / "figures" / "adaptive.png"
    figure.parent.mkdir(exist_ok=True)
    draw(outcomes, fixed, split, figure)
    if out:
        write(run, out, split, outcomes, fixed)
        shutil.copy(figure, Path(out) / "adaptive.png")
    return figure


def draw(
    outcomes: Sequence[Outcome], fixed: Mapping[str, tuple[int, float]], split: str, target: Path
) -> None:
    """Accuracy over mean blocks run, a point per threshold; crosses: every sample on one path."""
    fig, ax = plt.subplots(figsize=(6, 4))
    near = {"textcoords": "offset points", "fontsize": 7}
    places: dict[tuple[float, float], float] = {}  # thresholds that change nothing share a label
    for threshold, accuracy, blocks, _ in outcomes:
        places.setdefault((blocks, 100 * accuracy), threshold)
    ax.plot(*zip(*places, strict=True), marker=".", label="adaptive, by threshold")
    for place, threshold in places.items():
        ax.annotate(f"{threshold:g}", place, xytext=(3, 5), **near)
    crosses = {name: (blocks, 100 * accuracy) for name, (blocks, accuracy) in fixed.items()}
    ax.scatter(*zip(*crosses.values(), strict=True), marker="x", color="0.3", label="one path")
    for name, place in crosses.items():
        ax.annotate(name, place, xytext=(4, -10), **near)
    ax.set(xlabel="blocks run per sample (mean)", ylabel=f"{split} accuracy (%)")
    ax.grid(alpha=0.3)
    ax.legend()
    save(fig, target)


def write(
    run: str,
    out: str,
    split: str,
    outcomes: Sequence[Outcome],
    fixed: Mapping[str, tuple[int, float]],
) -> None:
    """<out>/adaptive.md and .csv."""
    stored = Path(run) / "summary.json"
    if not stored.is_file():
        raise UserError(f"out={out}: run={run} is not finished")
    summary = read_summary(Path(run))
    rows = [
        {
            "threshold": f"{threshold:g}",
            "accuracy (%)": 100 * accuracy,
            "blocks run (mean)": blocks,
            **{f"leave at {n} (%)": 100 * x for n, x in zip(fixed, left_at, strict=True)},
        }
        for threshold, accuracy, blocks, left_at in outcomes
    ]
    one = ", ".join(f"{n} {100 * right:.2f} % ({blocks})" for n, (blocks, right) in fixed.items())
    samples = summary["samples"]
    notes = [
        f"Every sample on one path (blocks): {one}.",
        f"Split {split} of {summary['data']} ({samples['train']:,} training, {samples['test']:,} "
        f"test samples), seed {summary['seed']}, {summary['epochs']:g} epochs.  ",
        f"Run: `{summary['command']}`, commit {summary['commit']}.", "",
        "![accuracy over blocks](adaptive.png)",
    ]  # fmt: skip
    write_table(out, "adaptive", TITLE, rows, notes)
