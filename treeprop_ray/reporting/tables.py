"""Tables as markdown, and the results writer: a table with the command and commit that made it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treeprop_ray.reporting.index import write_index
from treeprop_ray.run.folder import provenance


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


def columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str]) -> str:
    """Rows as aligned plain text, two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(map(justify, row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
