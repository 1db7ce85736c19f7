"""What stands on the screen at the end of a run: its table, its files, what one would type next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def told(folder: Path, summary: Mapping[str, Any]) -> str:
    """The table of paths, the files and the next commands."""
    names = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir() if p.name[0] != ".")
    lines = [str(summary["table"]), f"files: {folder}", f"  {'  '.join(names)}", "next:"]
    pairs = next_commands(folder, summary)
    width = max(len(command) for command, _ in pairs)
    return "\n".join([*lines, *(f"  {command:<{width}}  # {what}" for command, what in pairs)])


def next_commands(folder: Path, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Commands for a finished run and what they do."""
    run, final = f"run={shlex.quote(str(folder))}", summary["final"]
    scores: Mapping[str, Mapping[str, float]] = next(iter(final.values()), {})
    short = [path for path in scores if path.startswith("spine-")]
    path = f" path={short[-1]}" if short else ""
    split = "" if "test" in final or not final else f" split={next(iter(final))}"
    pairs = [
        (f"{typed('evaluate')} {run}{split}", "scores of every path"),
        (f"{typed('export')} {run}{path}", "a plain PyTorch program"),
        (f"{typed('report')} {run}", "the run as one HTML page"),
    ]
    if "perplexity" in scores.get("full", {}):
        pairs.append((f'{typed("generate")} {run} prompt="The "', "continues a text"))
    return pairs


def typed(command: str) -> str:
    """A command in the form in which this one was started."""
    script = Path(sys.argv[0]).name == "treeprop"
    return f"treeprop {command}" if script else f"python -m treeprop_ray.{command}"
