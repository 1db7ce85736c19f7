"""Write what a run has to show as one HTML page: settings, accuracies, figures, how to repeat it.

python -m treeprop_ray.report run=results/runs/<name>            # <run>/report.html
python -m treeprop_ray.report run=results/runs/<name> to=my.html
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treeprop_ray import cli, config
from treeprop_ray.config import opt


@dataclass
class ReportSettings:
    """Settings of the report command."""

    run: str = opt("", "run folder, e.g. results/runs/<name>")
    to: str = opt("", "the page; default: report.html in the run folder")


def load(words: Sequence[str]) -> ReportSettings:
    """Settings from command-line words."""
    settings: ReportSettings = config.merge(ReportSettings, ("", config.parse_overrides(words)))
    return settings


def run(settings: ReportSettings) -> None:
    """The report command."""
    from treeprop_ray.page import write_page

    print(f"wrote {write_page(settings.run, Path(settings.to) if settings.to else None)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.report`."""
    return cli.main(__doc__ or "", ReportSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
