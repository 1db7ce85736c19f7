"""Write the tables of sweeps and the index of all results, or one run as an HTML page.

    python -m treeprop_ray.report                     # every sweep's table, and the index of all
    python -m treeprop_ray.report sweep=alpha_beta    # one sweep's
    python -m treeprop_ray.report sweep=alpha_beta-mnist_d3
    python -m treeprop_ray.report run=results/runs/<name>            # <run>/report.html

A table is made from the run folders in `storage` and from the rows stored in <out>/<sweep>.csv, one
per run; where the run folders are gone, the CSV alone gives the same table. A page shows a run's
settings, accuracies, figures and how to repeat it. Tables are those of results/local, one's own;
with --record those of results/, which the project publishes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treeprop_ray import config
from treeprop_ray.config import cli, opt
from treeprop_ray.errors import UserError


@dataclass
class ReportSettings:
    """Settings of the report command."""

    sweep: str = opt("", "name of a sweep's table, e.g. alpha_beta; default: all")
    storage: str = opt(config.RUNS, "folder of the run folders")
    out: str = opt(config.LOCAL, f"folder of tables and figures; --record: {config.PUBLISHED}")
    run: str = opt("", "a run's page instead: its folder, e.g. results/runs/<name>")
    to: str = opt("", "the page; default: report.html in the run folder")


def load(words: Sequence[str]) -> ReportSettings:
    """Settings from command-line words."""
    settings: ReportSettings = config.merge(ReportSettings, ("", config.parse_overrides(words)))
    if settings.to and not settings.run:
        raise UserError(f"to={settings.to}: names the page of a run; give run=… too")
    return settings


def run(settings: ReportSettings) -> None:
    """The report command."""
    if settings.run:
        from treeprop_ray.reporting.page import write_page

        print(f"wrote {write_page(settings.run, Path(settings.to) if settings.to else None)}")
        return
    from treeprop_ray.reporting.index import write_index
    from treeprop_ray.sweep.report import names, write_sweep

    out = Path(settings.out)
    if not out.is_dir() and (out.exists() or not settings.sweep):
        raise UserError(f"out={settings.out}: no such folder")
    if settings.sweep:
        print(write_sweep(settings.sweep, settings.storage, out))
        return
    for name in names(settings.storage, out):
        print(f"{write_sweep(name, settings.storage, out)}\n")
    write_index(out)
    print(f"index: {out / 'README.md'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.report`."""
    word = f"out={config.PUBLISHED}"
    return cli.main(__doc__ or "", ReportSettings, load, run, argv=argv, record=word)


if __name__ == "__main__":
    sys.exit(main())
