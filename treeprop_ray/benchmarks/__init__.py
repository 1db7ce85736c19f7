"""The benchmarks behind `python -m treeprop_ray.bench NAME`, and what they share."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treeprop_ray.runs import provenance


def in_turn(candidates: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every candidate, `rounds` times, always one after the other.

    Timings on a shared machine drift by a factor of two; candidates that are timed in turn drift
    together, so compare them round by round (`ratio`).
    """
    for work in candidates.values():
        work()  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, work in candidates.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> float:
    """Median over the rounds of time(name) / time(base)."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def write_table(
    out: str, name: str, title: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str]
) -> str:
    """results/<name>.csv and .md with provenance; returns the table as text."""
    facts = provenance()  # before anything is written: the table itself must not count as a change
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    with (folder / f"{name}.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows(rows)
    table = markdown(rows)
    hardware = f"{facts['hardware']['cores']} cores, {facts['hardware']['cpu']}"
    lines = [
        f"# {title}", "", table, "", *notes, "",
        f"Command: `{facts['command']}`  ",
        f"Commit {facts['commit']}, {facts['date']}, {hardware}, "
        f"torch {facts['versions']['torch']}, ray {facts['versions']['ray']}",
    ]  # fmt: skip
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    from treeprop_ray.sweep.index import write_index

    write_index(folder)
    return table


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as an aligned markdown table."""
    columns = list(rows[0])
    cells = [columns, *([cell(row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def cell(value: Any) -> str:
    """How a figure is shown in a table."""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"
    return str(value)
