"""A table of finished runs: the score of every path, what differs, and the commands.

    python -m treeprop_ray.compare runs=[results/runs/a,results/runs/b] title="Text"

Reads each run's config.yaml and summary.json, writes <to>.md, and copies the summaries into the
folder <to>/, so that the table does not depend on the run folders. Without to= that is
results/local/compare; --record writes to results/compare, beside the project's own pages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from treeprop_ray import config
from treeprop_ray.config import cli, opt
from treeprop_ray.errors import UserError


@dataclass
class CompareSettings:
    """Settings of the compare command."""

    runs: list[str] = field(
        default_factory=lambda: [], metadata={"help": "run folders, in the order of the table"}
    )
    to: str = opt(f"{config.LOCAL}/compare", "the table is <to>.md, the summaries are in <to>/")
    title: str = opt("Runs", "heading of the table")
    note: str = opt("", "a sentence under the heading")
    split: str = opt("test", "which scores", choices=["validation", "test"])


def load(words: Sequence[str]) -> CompareSettings:
    """Settings from command-line words."""
    settings: CompareSettings = config.merge(CompareSettings, ("", config.parse_overrides(words)))
    if not settings.runs:
        raise UserError("runs=[]: at least one run folder")
    if not settings.to:
        raise UserError("to= : where to write the table, e.g. to=results/local/text")
    return settings


def run(settings: CompareSettings) -> None:
    """The compare command."""
    from treeprop_ray.reporting.comparison import write

    print(write(settings.runs, settings.to, settings.title, settings.note, settings.split))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.compare`."""
    word = f"to={config.PUBLISHED}/compare"
    return cli.main(__doc__ or "", CompareSettings, load, run, argv=argv, record=word)


if __name__ == "__main__":
    sys.exit(main())
