"""Does the update still point downhill? Measures a run on held-out batches, without changing it.

    python -m treeprop_ray.train … probe.every=500            # rows while the run goes
    python -m treeprop_ray.probe run=results/runs/<name>      # a row for its last checkpoint
    python -m treeprop_ray.probe run=results/runs/<name> checkpoint=all batches=8 draws=64
    python -m treeprop_ray.probe mode=table run=[results/runs/a,results/runs/b]   # probe.md

Rows go to probe.csv in the run folder, figures to figures/; probe_row.py says what the columns
mean. The gradient of the deployed chain is taken by backpropagation, the update by a training step
without the optimizer, both on the same batches of the validation split. Tables go to results/local;
with --record to results/, where the project keeps its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeprop_ray import config
from treeprop_ray.config import cli, opt
from treeprop_ray.errors import UserError


@dataclass
class ProbeSettings:
    """Settings of the probe command."""

    run: Any = opt("", "run folder, e.g. results/runs/<name>; mode=table, list: also several")
    mode: str = opt(
        "measure",
        "measure a checkpoint, or write the rows of finished runs to <out>/probe.md (table) or a "
        "line for each to <out>/probe_list.md (list; lines of other runs stay)",
        choices=["measure", "table", "list"],
    )
    keep: Any = opt("", "mode=table: sections of <out>/probe.md that stay as they are, by name")
    out: str = opt(
        config.LOCAL, f"mode=table, list: folder of the table; --record: {config.PUBLISHED}"
    )
    checkpoint: str = opt("last", "last, best, a step number, or all that are kept")
    batches: int = opt(4, "held-out batches, of the run's batch size", low=1, high=1024)
    draws: int = opt(16, "draws from q per sample for the bound F; 0 = leave it out", low=0)
    engine: str = opt("local", "one process, or the run's Ray actors", choices=["local", "ray"])
    data_root: str | None = opt(None, "hub folder, if it has moved since the run")
    storage: str = opt("", "where the checkpoints lie, if config.yaml of the run names a URL")


def load(words: Sequence[str]) -> ProbeSettings:
    """Settings from command-line words."""
    settings: ProbeSettings = config.merge(ProbeSettings, ("", config.parse_overrides(words)))
    several = isinstance(settings.run, list)
    if several and settings.mode == "measure":
        raise UserError(f"run={settings.run}: mode=measure takes one run folder")
    settings.run = [str(r) for r in settings.run] if several else str(settings.run or "")
    kept = settings.keep if isinstance(settings.keep, list) else [settings.keep]
    settings.keep = [str(name) for name in kept if name]
    return settings


def run(settings: ProbeSettings) -> None:
    """The probe command."""
    from treeprop_ray.reporting import probe_table, probing
    from treeprop_ray.run.folder import run_settings

    s = settings
    if s.mode == "measure":
        for text in probing.probe_run(
            s.run, s.checkpoint, s.batches, s.draws, s.engine, s.data_root, s.storage
        ):
            print(text)
        return
    runs = s.run if isinstance(s.run, list) else [s.run]
    for folder in runs:
        run_settings(folder)
    if s.mode == "list":
        print(f"table: {probe_table.write_list(runs, s.out)}")
    else:
        print(f"table: {probe_table.write(runs, s.out, s.keep)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.probe`."""
    word = f"out={config.PUBLISHED}"
    return cli.main(__doc__ or "", ProbeSettings, load, run, argv=argv, record=word)


if __name__ == "__main__":
    sys.exit(main())
