"""Minutes to finish under a rate of faults: a run that recovers beside one that is started again.

    PYTHONPATH=.:tests python -m lab.rate kills=0,1,2,4 steps=120 to=results

An actor is killed so many times, evenly over the steps. One run makes it anew and replays; the
other has max_failures=0, ends with its line, and the same command is given again at once, which
goes on from the last checkpoint (a person or a scheduler would take longer). Both must have the
undisturbed history. Rows are kept: the same command goes on.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lab.__main__ import WORDS
from lab.nemesis import Fault
from lab.runs import Run, disturb, judge, undisturbed

WAYS = {"recovers": [], "started again": ["max_failures=0"]}


@dataclass
class Rate:
    """Settings of the measurement."""

    kills: str = "0,1,2,4"
    steps: int = 120
    to: str = ""


def measure(way: str, kills: int, steps: int, folder: Path, whole: Any) -> dict[str, Any]:
    """One run."""
    gap = steps // (kills + 1)
    faults = [Fault(k, "kill", "forward", "host-1", (k + 1) * gap) for k in range(kills)]
    words = [*WORDS, "engine=ray", "placement=packed", "hosts=2", "checkpoint_every=20", *WAYS[way]]
    run = Run(folder / f"{way}-{kills}".replace(" ", "-"), words, faults, steps)
    run.by_hand = way == "started again"
    disturb(run)
    judge(run, whole)
    return {
        "kills": kills, "way": way, "minutes": round(run.seconds / 60, 2), "drivers": run.drivers,
        "steps repeated": sum(row["repeated"] for row in run.rows),
        "wrong": "; ".join(run.complaints),
    }  # fmt: skip


def figure(rows: Sequence[Any], target: Path) -> None:
    """Minutes over kills, a line for each way."""
    from treeprop_ray.reporting.plot import plt, save

    fig, ax = plt.subplots(figsize=(6, 4))
    for way in WAYS:
        mine = sorted((int(r["kills"]), float(r["minutes"])) for r in rows if r["way"] == way)
        ax.plot(*zip(*mine, strict=True), marker="o", label=way)
    ax.set(xlabel="kills in a run", ylabel="minutes to finish", ylim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend()
    save(fig, target)


def main(argv: list[str]) -> int:
    """Measure what is not there yet; 1 if a history is not the undisturbed one."""
    given = dict(word.split("=", 1) for word in argv)
    kinds = {f.name: type(getattr(Rate(), f.name)) for f in fields(Rate)}
    s = Rate(**{key: kinds[key](value) for key, value in given.items()})
    rows: list[dict[str, Any]] = []
    path = Path(s.to) / "lab_rate.csv"
    if s.to and path.is_file():
        with path.open(newline="") as f:
            rows = list(csv.DictReader(f))
    there = {(row["way"], int(row["kills"])) for row in rows}
    with tempfile.TemporaryDirectory(prefix="treeprop-rate-") as folder:
        whole = undisturbed(Path(folder) / "whole", WORDS, s.steps)
        for kills in map(int, s.kills.split(",")):
            for way in WAYS:
                if (way, kills) not in there:
                    rows.append(measure(way, kills, s.steps, Path(folder), whole))
                    print(rows[-1], flush=True)
    if s.to:
        from treeprop_ray.reporting.tables import write_table

        notes = [
            "![minutes over kills](lab_rate.png)", "",
            f"{s.steps} steps of digits on two packed actors, checkpoints every 20 steps, recovery "
            "points every 4. Start of Ray and of the actors is part of the time. Drivers: "
            "how often the command was given.",
        ]  # fmt: skip
        title = "Minutes to finish under a rate of faults"
        print(write_table(s.to, "lab_rate", title, rows, notes))
        figure(rows, Path(s.to) / "lab_rate.png")
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
