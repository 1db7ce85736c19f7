"""results/README.md: the paper's tables and figures with what was measured here, and all pages."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from treeprop_ray.config import spaces

HEAD = """# Results

Written by `python -m treeprop_ray.report --record`. Each page has its figures beside the command,
commit and hardware that made them; a `.csv` of a sweep has one row per run. The tables below are
those of the pages, so a figure here can be traced to a run the same way. What you run yourself is
written to `results/local`, with an index of its own.

- [The paper's tables and figures](#the-papers-tables-and-figures)
- [All sweeps](#all-sweeps)
- [Other measurements](#other-measurements)
"""
PAPER = Path(__file__).parent / "paper.yaml"
LONGEST = 30  # rows of a table that is shown here and not only linked


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper: the pages that answer it, and how to run it in full."""

    title: str
    pages: list[str]
    full: list[str]
    paper: str = ""
    there: list[Path] = field(default_factory=list)


def paper_items(out: Path) -> list[Item]:
    """The entries of paper.yaml with the pages there are."""
    pages = pages_of(out)
    items = []
    entries: Any = OmegaConf.to_container(OmegaConf.load(PAPER))
    for entry in entries:
        there = [p for name in entry["pages"] for p in pages if fnmatch(p.stem, name)]
        items.append(Item(**entry, there=list(dict.fromkeys(there))))
    return items


def pages_of(out: Path) -> list[Path]:
    """All pages of a folder of results but its index."""
    return sorted(p for p in out.glob("*.md") if p.name != "README.md")


def sweep_tables(out: Path) -> list[str]:
    """Names of the stored CSVs that hold a sweep's runs."""
    names = []
    for path in sorted(out.glob("*.csv")):
        with path.open(newline="") as f:
            if "sweep_command" in next(csv.reader(f), []):
                names.append(path.stem)
    return names


def write_index(out: Path) -> None:
    """Write README.md of a folder of results."""
    (out / "README.md").write_text(index_of(out))


def index_of(out: Path) -> str:
    """The index of all pages in a folder of results."""
    sweeps, pages = sweep_tables(out), pages_of(out)
    lines = [HEAD, "## The paper's tables and figures", ""]
    shown: set[Path] = set()
    for item in paper_items(out):
        lines += _item(item, sweeps, shown)
        shown.update(item.there)
    lines += ["## All sweeps", "", "| table | what | runs | command |", "|---|---|---|---|"]
    for page in pages:
        if page.stem in sweeps:
            runs = sum(1 for _ in (out / f"{page.stem}.csv").open()) - 1
            lines.append(_line(page, f" {runs} |"))
    run = {name.partition("-")[0] for name in sweeps}
    for name in spaces.shipped():
        if name not in run:
            command = f"python -m treeprop_ray.tune sweep={name}"
            lines.append(f"| {name} | {spaces.title(name)} | not run | `{command}` |")
    lines += ["", "## Other measurements", "", "| page | what | command |", "|---|---|---|"]
    lines += [_line(page, "") for page in pages if page.stem not in sweeps]
    return "\n".join(lines) + "\n"


def _item(item: Item, sweeps: list[str], shown: set[Path]) -> list[str]:
    """A section of the index: our tables, the paper's figures, the full command."""
    lines = [f"### {item.title}", ""]
    for page in item.there:
        text = page.read_text()
        lines += [f"**[{_title(text, page)}]({page.name})**", ""]
        if page in shown:
            lines[-2] += " (table above)"
        elif page.stem in sweeps:  # tables with their notes: epochs, seeds, data, time, command
            body = text.partition("\n## ")[2].partition("\n![")[0].partition("\nEvery run")[0]
            lines += [f"{'#' * 4} {body.strip()}".replace("\n## ", "\n#### "), ""]
        else:
            table = _first_table(text)
            lines += [*table, ""] if len(table) <= LONGEST else []
            lines += [f"Command: {_commands(text)}", ""]
    if not item.there:
        lines += ["Not run here.", ""]
    if item.paper:
        lines += [f"Paper: {item.paper.strip()}", ""]
    return [*lines, "In full: " + ", ".join(f"`{c}`" for c in item.full), ""]


def _first_table(text: str) -> list[str]:
    """The lines of a page's first table."""
    table = re.search(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    return table[0].splitlines() if table else []


def _title(text: str, page: Path) -> str:
    return next((line[2:] for line in text.splitlines() if line.startswith("# ")), page.stem)


def _commands(text: str) -> str:
    commands = re.findall(r"^Command: `(.+?)`", text, re.MULTILINE)
    return "<br>".join(f"`{c}`" for c in commands) or "on the page"


def _line(page: Path, middle: str) -> str:
    text = page.read_text()
    return f"| [{page.stem}]({page.name}) | {_title(text, page)} |{middle} {_commands(text)} |"
