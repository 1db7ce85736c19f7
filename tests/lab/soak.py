"""The soak: a run of many steps on a Ray of its own, and the memory of every process meanwhile.

    PYTHONPATH=.:tests python -m lab.soak steps=50000 transport=store,stream to=results

A sample every few seconds: private pages of the driver and of everything below it (actors, raylet,
control store, Ray's agents). Flat is a process that in the second half of the run grows by less
than LIMIT megabytes in 10,000 steps. The samples of a transport that was run are kept
(`lab_soak_samples.csv`): the same command goes on with the next one.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lab.processes import below, kind_of, private_mb

WORDS = ["engine=ray", "model.blocks=2", "model.hidden=4", "batch=4", "placement=packed", "hosts=2",
         "log_every=100", "eval_every=100000", "checkpoint_every=500", "keep_last=2", "name=r",
         "keep_best=false", "loggers=[csv]", "timeline_steps=0"]  # fmt: skip
LIMIT = 5.0  # MB in 10,000 steps
Sample = dict[str, Any]  # transport, step, seconds, process, MB


@dataclass
class Soak:
    """Settings of the soak."""

    steps: int = 50_000
    transport: str = "store,stream"
    every: float = 10.0  # seconds between samples
    to: str = ""


def last_step(metrics: Path) -> int:
    """How far a run is: the step of its last whole row."""
    try:
        with metrics.open(newline="") as f:
            return max((int(row["step"]) for row in csv.DictReader(f) if row["step"]), default=0)
    except (OSError, ValueError, TypeError, KeyError):  # not there yet, or a row half written
        return 0


def soak(steps: int, transport: str, every: float, folder: Path) -> list[Sample]:
    """Train, and look at all processes every few seconds."""
    words = [*WORDS, f"steps={steps}", "epochs=1000000", f"transport={transport}", f"out={folder}"]
    command = [sys.executable, "-m", "treeprop_ray.train", *words]
    samples: list[Sample] = []
    began = time.monotonic()
    with (folder / "train.log").open("w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
        while run.poll() is None:
            step = last_step(folder / "r" / "metrics.csv")
            names = {run.pid: "driver", **{p: kind_of(c) for p, c in below(run.pid).items()}}
            for pid, name in names.items():
                if (mb := private_mb(pid)) is not None and step:
                    samples.append({
                        "transport": transport, "step": step, "process": name, "pid": pid,
                        "seconds": round(time.monotonic() - began), "MB": round(mb, 1),
                    })  # fmt: skip
            try:
                run.wait(every)
            except subprocess.TimeoutExpired:
                continue
    if run.returncode:
        raise SystemExit(f"the run failed: {(folder / 'train.log').read_text()[-500:]}")
    return samples


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares: how much the second grows for one of the first."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def table(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row for each process that lived through the second half of a run."""
    rows = []
    for transport in dict.fromkeys(s["transport"] for s in samples):
        mine = [s for s in samples if s["transport"] == transport]
        end = max(int(s["step"]) for s in mine)
        for pid, name in {s["pid"]: s["process"] for s in mine}.items():
            points = [(float(s["step"]), float(s["MB"])) for s in mine if s["pid"] == pid]
            half = [p for p in points if p[0] >= end / 2]
            if not half or points[0][0] > end / 2 or half[-1][0] < 0.9 * end:
                continue
            grown = 10_000 * slope(half)
            tenth = next((mb for step, mb in points if step >= end / 10), points[0][1])
            rows.append({
                "transport": transport, "process": name, "MB after a tenth": f"{tenth:.0f}",
                "at half": f"{half[0][1]:.0f}", "at the end": f"{half[-1][1]:.0f}",
                "most": f"{max(mb for _, mb in points):.0f}",
                "MB per 10,000 steps, second half": f"{grown:+.2f}",
                "flat": "yes" if grown < LIMIT else "no",
            })  # fmt: skip
    return rows


def figure(samples: Sequence[Sample], target: Path) -> None:
    """Memory of every process over the steps."""
    from treeprop_ray.reporting.plot import plt, save

    kinds = list(dict.fromkeys(s["transport"] for s in samples))
    fig, axes = plt.subplots(1, len(kinds), figsize=(6 * len(kinds), 4), squeeze=False, sharey=True)
    for ax, transport in zip(axes[0], kinds, strict=True):
        mine = [s for s in samples if s["transport"] == transport]
        for pid, name in {s["pid"]: s["process"] for s in mine}.items():
            points = [(int(s["step"]), float(s["MB"])) for s in mine if s["pid"] == pid]
            ax.plot(*zip(*points, strict=True), label=name, lw=1)
        ax.set(xlabel="step", title=f"transport={transport}", ylim=(0, None))
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("private memory (MB)")
    axes[0][-1].legend(fontsize=7)
    save(fig, target)


def kept(path: Path) -> list[Sample]:
    """Samples of earlier runs."""
    if not path.is_file():
        return []
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def keep(path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    """Write all samples."""
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(samples[0]))
        writer.writeheader()
        writer.writerows(samples)


def main(argv: list[str]) -> int:
    """Run the soak; 1 if a process grows."""
    given = dict(word.split("=", 1) for word in argv)
    kinds = {f.name: type(getattr(Soak(), f.name)) for f in fields(Soak)}
    s = Soak(**{key: kinds[key](value) for key, value in given.items()})
    to = Path(s.to or tempfile.mkdtemp(prefix="treeprop-soak-"))
    to.mkdir(parents=True, exist_ok=True)
    path = to / "lab_soak_samples.csv"
    samples = kept(path)
    for transport in s.transport.split(","):
        if transport in {sample["transport"] for sample in samples}:
            continue
        with tempfile.TemporaryDirectory(prefix="treeprop-soak-") as folder:
            samples += soak(s.steps, transport, s.every, Path(folder))
        keep(path, samples)
    rows = table(samples)
    grown = [row["process"] for row in rows if row["flat"] == "no"]
    if s.to:
        from treeprop_ray.reporting.tables import write_table

        figure(samples, to / "lab_soak.png")
        took = {t: max(int(x["seconds"]) for x in samples if x["transport"] == t)
                for t in dict.fromkeys(x["transport"] for x in samples)}  # fmt: skip
        notes = [
            "![memory over the steps](lab_soak.png)", "",
            f"{s.steps} steps with each transport ("
            + ", ".join(f"{t}: {n / 60:.0f} min" for t, n in took.items())
            + f") on a local Ray, two actors, `{' '.join(WORDS)}`. Private pages (resident less "
            f"shared), sampled every {s.every:g} s; processes that lived through the second half. "
            f"Flat: less than {LIMIT:g} MB per 10,000 steps in the second half (least squares). "
            "All samples: [lab_soak_samples.csv](lab_soak_samples.csv).",
        ]  # fmt: skip
        write_table(s.to, "lab_soak", "A long run: memory of every process", rows, notes)
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    print(f"{len(rows)} processes, growing: {', '.join(grown) or 'none'}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
