"""Rows of the laboratory, written as they come, and the page that is made of them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ["run", "commit", "layout", "transport", "drivers", "run_seconds", "number", "kind",
           "phase", "actor", "step", "seconds", "repeated", "wrong"]  # fmt: skip
Row = Mapping[str, Any]


def stored(path: Path) -> list[dict[str, str]]:
    """The rows of earlier calls; a torn last one does not count."""
    if not path.is_file():
        return []
    with path.open(newline="") as f:
        return [row for row in csv.DictReader(f) if None not in row.values()]


def store(path: Path, rows: Sequence[Row]) -> None:
    """Add the rows of a run, all at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.is_file()
    with path.open("a", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """By kind of fault: how many, where, how long until the next new step, what was repeated."""
    found = []
    for kind in sorted({row["kind"] for row in rows}):
        mine = [row for row in rows if row["kind"] == kind]
        times = sorted(float(row["seconds"]) for row in mine if row["seconds"] != "")
        again = [int(row["repeated"]) for row in mine if row["repeated"] != ""]
        found.append({
            "fault": kind, "times": str(len(mine)),
            "in phases": ", ".join(sorted({row["phase"] for row in mine})),
            "median seconds to a new step": f"{statistics.median(times):.1f}" if times else "-",
            "longest": f"{times[-1]:.1f}" if times else "-",
            "steps repeated (mean)": f"{statistics.mean(again):.1f}" if again else "-",
            "wrong": str(sum(bool(row["wrong"]) for row in mine)),
        })  # fmt: skip
    return found


def figure(rows: Sequence[Row], target: Path) -> None:
    """Recovery time and steps repeated, a dot for each fault."""
    from treeprop_ray.reporting.plot import plt, save

    kinds = sorted({row["kind"] for row in rows})
    fig, axes = plt.subplots(1, 2, figsize=(11, 0.4 * len(kinds) + 1.5), sharey=True)
    shown = (("seconds", "seconds to the next new step"), ("repeated", "steps done again"))
    for ax, (key, label) in zip(axes, shown, strict=True):
        for transport, marker in (("store", "o"), ("stream", "x")):
            mine = [r for r in rows if r["transport"] == transport and r[key] != ""]
            where = [kinds.index(row["kind"]) for row in mine]
            ax.plot([float(r[key]) for r in mine], where, marker, alpha=0.7, label=transport)
        ax.set(xlabel=label, xlim=(0, None))
        ax.grid(alpha=0.3)
    axes[0].set_yticks(range(len(kinds)), kinds)
    axes[1].legend()
    save(fig, target)


def write(to: Path, rows: Sequence[Row], wanted: int, notes: Sequence[str]) -> str:
    """results/lab_faults: the table, the figure, what was run."""
    from treeprop_ray.reporting.tables import write_table

    runs = {row["run"] for row in rows}
    wrong = sorted({f"{row['run']}: {row['wrong']}" for row in rows if row["wrong"]})
    again = sum(int(drivers) - 1 for _, drivers in {(row["run"], row["drivers"]) for row in rows})
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    told = [
        "![recovery by kind of fault](lab_faults.png)", "",
        f"**{len(rows)} of {wanted} faults** have been run, in {len(runs)} runs (commits "
        f"{commits}); the same command goes on. Drivers that a fault has ended and that were "
        f"started again: "
        f"{again}. Every update of every actor, repeated ones too, was compared with the "
        "undisturbed history (hash of weights and optimizer state). Wrong: faults in runs whose "
        f"history differs, that hung or ended otherwise than promised: "
        f"{'; '.join(wrong) or 'none'}. "
        "A fault that struck while another was being mended is not timed. Seconds are those of "
        "a busy machine with two cores, where an actor takes 3 s to start and more.", *notes,
        "Every fault: [lab_faults_rows.csv](lab_faults_rows.csv).",
    ]  # fmt: skip
    figure(rows, to / "lab_faults.png")
    return write_table(str(to), "lab_faults", "Faults by kind", table(rows), told)
