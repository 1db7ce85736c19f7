"""Does the update still point downhill? Measures a run on held-out batches, without changing it.

    python -m treeprop_ray.train … probe.every=500            # rows while the run goes
    python -m treeprop_ray.probe run=results/runs/<name>      # a row for its last checkpoint
    python -m treeprop_ray.probe run=results/runs/<name> checkpoint=all batches=8 draws=64
    python -m treeprop_ray.probe mode=table run=[results/runs/a,results/runs/b]   # results/probe.md

Rows go to probe.csv in the run folder, figures to figures/; probe_row.py says what the columns
mean. The gradient of the deployed chain is taken by backpropagation, the update by a training step
without the optimizer, both on the same batches of the validation split.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from treeprop_ray import cli, config
from treeprop_ray.config import Settings, opt
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from treeprop_ray.engine.base import Engine


class Probed(Protocol):
    """An engine that can be probed: local or Ray, method=tree."""

    tree: Tree

    def probe(self, batches: int, draws: int) -> dict[str, float]:
        """The row of a probe (probe_row.py), without step and epoch."""


class Prober:
    """Probes a run while it goes: a row before the first step, every so many, and at the end."""

    def __init__(self, settings: Settings, folder: Path, engine: Engine, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        from treeprop_ray.hosts.probe_row import columns
        from treeprop_ray.run.metrics import MetricsFile

        self.rule, self.folder, self.engine = settings.probe, folder, cast(Probed, engine)
        self.file = MetricsFile(folder / "probe.csv", columns(engine.tree), start)
        self.board = SummaryWriter(folder / "tensorboard")

    def at(self, step: int, epoch: int, last: bool = False) -> float:
        """Probe if it is due after `step` steps; returns the seconds it took."""
        if step % self.rule.every and not last:
            return 0.0
        began = time.perf_counter()
        row = self.engine.probe(self.rule.batches, self.rule.draws)
        self.file.write({"step": step, "epoch": epoch, **row})
        for key, value in row.items():
            self.board.add_scalar(f"probe/{key}", value, step)
        return time.perf_counter() - began

    def close(self) -> None:
        """Close the files and draw the figures."""
        from treeprop_ray.reporting.probe_figures import draw

        self.file.close()
        self.board.close()
        draw(self.folder, self.engine.tree)


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
    out: str = opt("results", "mode=table, list: folder of the table")
    checkpoint: str = opt("last", "last, best, a step number, or all that are kept")
    batches: int = opt(4, "held-out batches, of the run's batch size", low=1, high=1024)
    draws: int = opt(16, "draws from q per sample for the bound F; 0 = leave it out", low=0)
    engine: str = opt("local", "one process, or the run's Ray actors", choices=["local", "ray"])
    data_root: str | None = opt(None, "hub folder, if it has moved since the run")


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
    from treeprop_ray import data
    from treeprop_ray.reporting.probe_figures import draw
    from treeprop_ray.run import checkpoint
    from treeprop_ray.run.folder import checkpoints_of
    from treeprop_ray.run.reading import pick_checkpoint, run_settings
    from treeprop_ray.train import build_engine

    if settings.mode != "measure":
        from treeprop_ray.reporting import probe_table

        runs = settings.run if isinstance(settings.run, list) else [settings.run]
        for run_ in runs:
            run_settings(run_)
        if settings.mode == "list":
            print(f"table: {probe_table.write_list(runs, settings.out)}")
        else:
            print(f"table: {probe_table.write(runs, settings.out, settings.keep)}")
        return
    of_run = run_settings(settings.run)
    if of_run.method != "tree" or config.recurrent(of_run):
        kind = f"method={of_run.method} model.name={of_run.model.name}"
        raise UserError(f"run={settings.run}: has {kind}; the probe is for method=tree over blocks")
    folder = Path(settings.run)
    names = [settings.checkpoint]
    if settings.checkpoint == "all":
        names = [str(step) for step in checkpoint.steps(checkpoints_of(of_run, folder))] or ["last"]
    found = [pick_checkpoint(settings.run, name) for name in names]
    of_run.data.root = settings.data_root or of_run.data.root
    of_run.engine = settings.engine
    engine = build_engine(of_run, data.load(of_run), total_steps=1)
    rows = []
    try:
        for point in found:
            checkpoint.check_fits(point, engine.tree.N, of_run.split)
            engine.load((point.weights, point.optimizer), point.meta["step"])
            row = cast(Probed, engine).probe(settings.batches, settings.draws)
            rows.append({"step": point.meta["step"], "epoch": point.meta["epoch"], **row})
            print(f"{point.path}\n{table(row, engine.tree)}")
    finally:
        engine.close()
    add_rows(folder / "probe.csv", rows, engine.tree)
    draw(folder, engine.tree)
    print(f"rows: {folder / 'probe.csv'}; figures: {folder / 'figures'}")


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]], tree: Tree) -> None:
    """Put rows into probe.csv in the order of steps; a row of the same step is replaced."""
    from treeprop_ray.hosts.probe_row import columns
    from treeprop_ray.run.metrics import MetricsFile

    kept: dict[int, Mapping[str, Any]] = {}
    if path.is_file():
        with path.open(newline="") as f:
            kept = {int(row["step"]): row for row in csv.DictReader(f)}
    kept |= {int(row["step"]): row for row in rows}
    aside = path.with_suffix(".tmp")
    aside.unlink(missing_ok=True)
    file = MetricsFile(aside, columns(tree), 0)
    for _, row in sorted(kept.items()):
        file.write(row)
    file.close()
    aside.replace(path)


def table(row: Mapping[str, float], tree: Tree) -> str:
    """A row as plain text: whole numbers first, then blocks, states and spine."""
    from treeprop_ray.core.network import STEM, edge_name
    from treeprop_ray.hosts.probe_row import WHOLE

    def number(key: str) -> str:
        value = row.get(key)
        return "-" if value is None else f"{value:.4g}"

    lines = [f"{key:<12} {number(key):>10}" for key in WHOLE if key in row]
    blocks = [edge_name(e) for e in (STEM, *tree.path_edges(tree.chain))]
    groups: list[tuple[str, list[Any], list[str]]] = [
        (
            "block",
            [b for b in blocks if f"cosine/{b}" in row],
            ["cosine", "bias", "ratio", "share"],
        ),
        ("state", list(tree.nodes), ["kl", "log_ratio"]),
        ("spine", [node.n for node in tree.spine], ["clean_ce", "tree_ce", "leak"]),
    ]
    for title, names, kinds in groups:
        lines.append(f"{title:<12} " + " ".join(f"{kind:>10}" for kind in kinds))
        for name in names:
            cells = " ".join(f"{number(f'{kind}/{name}'):>10}" for kind in kinds)
            lines.append(f"{name:<12} {cells}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.probe`."""
    return cli.main(__doc__ or "", ProbeSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
