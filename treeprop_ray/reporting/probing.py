"""Rows of probe.csv: measured while a run goes, or of checkpoints it has left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from treeprop_ray import data, engine, methods
from treeprop_ray.config.nested import Probe, RaySettings
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.probe_row import PARTS, WHOLE, columns
from treeprop_ray.reporting.probe_figures import draw
from treeprop_ray.run import checkpoint
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.folder import run_settings
from treeprop_ray.run.metrics import MetricsFile, read_rows
from treeprop_ray.run.reading import pick_checkpoint, stored_at
from treeprop_ray.run.trainer import Trainer


class Probing(Callback):
    """Probes a run while it goes: a row before the first step, every so many, and at the end."""

    file: MetricsFile | None = None  # none in a run that writes nothing

    def __init__(self, settings: Probe) -> None:
        self.settings = settings

    def on_start(self, run: Trainer) -> None:
        """Open the files; the row of an untrained network."""
        if not (run.folder and run.writes):
            return
        folder = run.folder.path
        self.file = MetricsFile(folder / "probe.csv", columns(run.engine.tree), run.start)
        self.board = SummaryWriter(folder / "tensorboard")
        if run.start == 0:
            self._measure(run, self.file, 0)

    def on_step(self, run: Trainer, done: int) -> None:
        """Probe if it is due."""
        if self.file and (done % self.settings.every == 0 or done == run.total_steps):
            self._measure(run, self.file, done)

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        """Close the files and draw the figures."""
        if self.file and run.folder:
            self.file.close()
            self.board.close()
            draw(run.folder.path, run.engine.tree)

    def _measure(self, run: Trainer, file: MetricsFile, step: int) -> None:
        began = time.perf_counter()
        row = run.engine.probe(self.settings.batches, self.settings.draws)
        file.write({"step": step, "epoch": step // run.per_epoch, **row})
        for key, value in row.items():
            self.board.add_scalar(f"probe/{key}", value, step)
        run.log.pause(time.perf_counter() - began)


def probe_run(
    run: str,
    which: str,
    batches: int,
    draws: int,
    engine_name: str,
    data_root: str | None,
    storage: str = "",
) -> Iterator[str]:
    """Probe checkpoints of a run into its probe.csv and figures; says what it has measured."""
    settings, folder = run_settings(run), Path(run)
    method = methods.of(settings)
    if not method.probed:
        kind = f"method={method.name} model.name={settings.model.name}"
        raise UserError(f"run={run}: has {kind}; the probe is for method=tree over blocks")
    names = [which]
    if which == "all":
        steps = checkpoint.steps(stored_at(run, settings, storage))
        names = [str(s) for s in steps] or ["last"]
    points = [pick_checkpoint(run, name, storage) for name in names]
    settings.data.root = data_root or settings.data.root
    settings.engine, settings.ray = engine_name, RaySettings()  # the file's cluster is not joined
    probed = engine.build(methods.job_of(settings, data.load(settings), total_steps=1))
    rows = []
    try:
        for point in points:
            checkpoint.check_fits(point, probed.tree.N, settings.split)
            probed.load((dict(point.weights), dict(point.optimizer)), point.meta["step"])
            row = probed.probe(batches, draws)
            rows.append({"step": point.meta["step"], "epoch": point.meta["epoch"], **row})
            yield f"{point.path}\n{table(row, probed.tree)}"
    finally:
        probed.close()
    add_rows(folder / "probe.csv", rows, probed.tree)
    draw(folder, probed.tree)
    yield f"rows: {folder / 'probe.csv'}; figures: {folder / 'figures'}"


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]], tree: Tree) -> None:
    """Put rows into probe.csv in the order of steps; a row of the same step is replaced."""
    kept: dict[int, Mapping[str, Any]] = {}
    if path.is_file():
        kept = {int(row["step"]): row for row in read_rows(path)}
    kept |= {int(row["step"]): row for row in rows}
    aside = path.with_suffix(".tmp")
    aside.unlink(missing_ok=True)
    file = MetricsFile(aside, columns(tree), 0)
    for _, row in sorted(kept.items()):
        file.write(row)
    file.close()
    aside.replace(path)


def table(row: Mapping[str, float], tree: Tree) -> str:
    """A row as plain text with what it means: whole numbers first, then blocks, states, spine."""

    def number(key: str) -> str:
        value = row.get(key)
        return "-" if value is None else f"{value:.4g}"

    lines = [f"{key:<12} {number(key):>10}  {text}" for key, text in WHOLE.items() if key in row]
    blocks = [edge_name(e) for e in (STEM, *tree.path_edges(tree.chain))]
    measured = [b for b in blocks if f"cosine/{b}" in row]
    groups: list[tuple[str, list[Any], list[str]]] = [
        ("block", measured, ["cosine", "bias", "ratio", "share"]),
        ("state", list(tree.nodes), ["kl", "log_ratio"]),
        ("spine", [node.n for node in tree.spine], ["clean_ce", "tree_ce", "leak"]),
    ]
    for title, names, kinds in groups:
        lines += ["", *(f"{kind}: {PARTS[kind]}" for kind in kinds)]
        lines.append(f"{title:<12} " + " ".join(f"{kind:>10}" for kind in kinds))
        for name in names:
            cells = " ".join(f"{number(f'{kind}/{name}'):>10}" for kind in kinds)
            lines.append(f"{name:<12} {cells}")
    return "\n".join(lines)
