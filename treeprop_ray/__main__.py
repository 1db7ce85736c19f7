"""`treeprop <command> key=value …`, the same as `python -m treeprop_ray.<command> key=value …`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from treeprop_ray.config import cli

COMMANDS = (
    "train", "watch", "evaluate", "export", "generate", "tune", "report", "compare", "probe",
    "bench", "doctor", "plan",
)  # fmt: skip


def listing() -> str:
    """The commands with the first lines of their docstrings."""
    docs = {
        name: importlib.import_module(f"treeprop_ray.{name}").__doc__ or "" for name in COMMANDS
    }
    lines = [f"  {name:<9} {doc.strip().partition(chr(10))[0]}" for name, doc in docs.items()]
    return "\n".join(
        [
            "usage: treeprop <command> key=value …   (or python -m treeprop_ray.<command> …)",
            "",
            *lines,
            "",
            "treeprop <command> --help lists the command's keys.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command; without one, list them."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        print(listing())
        return cli.DONE
    if words[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"error: {words[0]!r}: no such command; one of {known}", file=sys.stderr)
        return cli.BAD_INPUT
    command = importlib.import_module(f"treeprop_ray.{words[0]}")
    code: int = command.main(words[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
