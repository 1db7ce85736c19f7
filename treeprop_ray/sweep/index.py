"""results/README.md: what has been measured, with the command of each table, and what has not."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from treeprop_ray.sweep.space import load_space, shipped

HEAD = """# Results

Written by `python -m treeprop_ray.report`. Each page has its figures beside the command, commit and
hardware that made them; a `.csv` of a sweep has one row per run.
"""


def sweep_tables(out: Path) -> list[str]:
    """Names of the stored CSVs that hold a sweep's runs."""
    found = []
    for path in sorted(out.glob("*.csv")):
        with path.open(newline="") as f:
            if "sweep_command" in next(csv.reader(f), []):
                found.append(path.stem)
    return found


def write_index(out: Path) -> None:
    """Write README.md of a folder of results."""
    (out / "README.md").write_text(index_of(out))


def index_of(out: Path) -> str:
    """The index of all pages in a folder of results."""
    sweeps = sweep_tables(out)
    pages = sorted(p for p in out.glob("*.md") if p.name != "README.md")
    lines = [HEAD, "## Sweeps", "", "| table | what | runs | command |", "|---|---|---|---|"]
    for page in pages:
        if page.stem in sweeps:
            runs = sum(1 for _ in (out / f"{page.stem}.csv").open()) - 1
            lines.append(_line(page, f" {runs} |"))
    run = {name.partition("-")[0] for name in sweeps}
    for name in shipped():
        if name not in run:
            command = f"python -m treeprop_ray.tune sweep={name}"
            lines.append(f"| {name} | {load_space(name).title} | not run | `{command}` |")
    lines += ["", "## Other measurements", "", "| page | what | command |", "|---|---|---|"]
    lines += [_line(page, "") for page in pages if page.stem not in sweeps]
    return "\n".join(lines) + "\n"


def _line(page: Path, middle: str) -> str:
    text = page.read_text()
    title = next((line[2:] for line in text.splitlines() if line.startswith("# ")), page.stem)
    commands = re.findall(r"^Command: `(.+?)`", text, re.MULTILINE)
    shown = "<br>".join(f"`{c}`" for c in commands) or "on the page"
    return f"| [{page.stem}]({page.name}) | {title} |{middle} {shown} |"
