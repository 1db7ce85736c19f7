"""Adaptive inference as a figure, and as a page of results with the run's own command."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from treeprop_ray.errors import UserError
from treeprop_ray.reporting.plot import label_points, plt, save
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.run.folder import read_summary

TITLE = "Adaptive inference: samples stop where the answer is sure enough"


class Table(Protocol):
    """What is shown, as inference/adaptive.py has it."""

    @property
    def key(self) -> str: ...
    @property
    def rows(self) -> Sequence[Any]: ...
    @property
    def exits(self) -> tuple[str, ...]: ...
    @property
    def paths(self) -> Mapping[str, tuple[int, float]]: ...
    @property
    def read(self) -> Mapping[str, tuple[int, float]]: ...
    @property
    def calibration(self) -> Any: ...


def show(run: str, out: str, split: str, table: Table) -> Path:
    """Draw figures/adaptive.png of a run, with `out` the page there too; returns the figure."""
    figure = Path(run) / "figures" / "adaptive.png"
    figure.parent.mkdir(exist_ok=True)
    draw(table, split, figure)
    if out:
        write(run, out, split, table)
        shutil.copy(figure, Path(out) / "adaptive.png")
    return figure


def draw(table: Table, split: str, target: Path) -> None:
    """Accuracy over mean blocks run; crosses: every sample on one path."""
    fig, ax = plt.subplots(figsize=(6.5, 4.2))
    places = sorted({(r.outcome.blocks, 100 * r.outcome.accuracy) for r in table.rows})
    ax.plot(*zip(*places, strict=True), marker=".", label=f"adaptive, by {table.key}")
    crosses = [(blocks, 100 * right) for blocks, right in table.paths.values()]
    ax.scatter(*zip(*crosses, strict=True), marker="x", s=20, color="0.6", label="one path")
    dots = [(blocks, 100 * right) for blocks, right in table.read.values()]
    label = "one path, read as the exits are"
    ax.scatter(*zip(*dots, strict=True), marker="+", s=24, color="C1", alpha=0.6, label=label)
    # the best path of each length stands above all others of it: only these have room for a name
    best: dict[int, tuple[float, str]] = {}
    for name, (blocks, right) in table.paths.items():
        best[blocks] = max(best.get(blocks, (0.0, "")), (100 * right, name))
    ax.set(xlabel="blocks run per sample (mean)", ylabel=f"{split} accuracy (%)")
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right")
    label_points(ax, [((blocks, right), name) for blocks, (right, name) in best.items()])
    save(fig, target)


def write(run: str, out: str, split: str, table: Table) -> None:
    """<out>/adaptive.md and .csv."""
    stored = Path(run) / "summary.json"
    if not stored.is_file():
        raise UserError(f"out={out}: run={run} is not finished")
    summary = read_summary(Path(run))
    rows = [
        {
            table.key: f"{row.asked:g}",
            "accuracy (%)": 100 * row.outcome.accuracy,
            "blocks run (mean)": row.outcome.blocks,
            "single paths at as many blocks (%)": 100 * row.fixed,
            "ahead by (points)": 100 * (row.outcome.accuracy - row.fixed),
            "single paths, read as the exits are (%)": 100 * row.read,
            **{
                f"leave at {n} (%)": 100 * share
                for n, share in zip(table.exits, row.outcome.left_at, strict=True)
            },
        }
        for row in table.rows
    ]
    one = ", ".join(f"{n} {100 * right:.2f} % ({k})" for n, (k, right) in table.paths.items())
    calibration, samples = table.calibration, summary["samples"]
    scales = ", ".join(
        f"{e.name} {e.readout.temperature:.3f}{' after a map' if e.readout.matrix else ''}"
        for e in calibration.exits
    )
    joined = ", ".join(f"{e.name} by {how_joined(e)}" for e in calibration.exits[1:]) or "one exit"
    notes = [
        f"Exits, their temperatures ({scales}), how the answers of all exits so far are joined "
        f"({joined}) and all thresholds were chosen by the {calibration.samples:,} samples of the "
        "validation split; the maps of the logits were fitted to training samples. "
        f"The accuracies are those of the split {split}. Single paths at as many blocks: the best "
        f"path of the tree, on the split {split} itself, of at most so many blocks, or if that is "
        "more a shorter and a longer one, each for a part of the samples drawn at random. Read as "
        "the exits are: the same with the map and the temperature of each path.  ",
        f"Every sample on one path (blocks): {one}.  ",
        f"Split {split} of {summary['data']} ({samples['train']:,} training, {samples['test']:,} "
        f"test samples), seed {summary['seed']}, {summary['epochs']:g} epochs.  ",
        f"Run: `{summary['command']}`, commit {summary['commit']}.", "",
        "![accuracy over blocks](adaptive.png)",
    ]  # fmt: skip
    write_table(out, "adaptive", TITLE, rows, notes)


def how_joined(exit_: Any) -> str:
    """How an exit makes its answer of what all exits so far have said."""
    if exit_.joint.matrix:
        return "a map of all logits"
    alone = not any(exit_.weights[:-1])
    return "its own answer" if alone else "a weighted sum"
