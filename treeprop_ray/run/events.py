"""events.jsonl of a run folder: what a run is, and what happens to it while it goes.

One JSON object per line: `kind`, `time` (seconds since the epoch), `step`, and
    start    what a reader of the metrics needs to know: steps, tree, paths, kind of score
    notice   `text`: actors were lost, the run goes on elsewhere
    end      finished, with a summary
    stop     over without one: interrupted or failed
A run that was taken up again has several starts. The last line may be torn.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeprop_ray.config import hidden
from treeprop_ray.run.callbacks import Callback

if TYPE_CHECKING:
    from treeprop_ray.run.trainer import Trainer

NAME = "events.jsonl"


class Events(Callback):
    """Writes them."""

    path: Path | None = None  # none before the start

    def on_start(self, run: Trainer) -> None:
        """What the run is."""
        assert run.folder is not None
        self.path = run.folder.path / NAME
        if self.path.is_file() and not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a") as file:  # what an earlier process had left torn
                file.write("\n")
        self._write("start", run.start, **facts(run))

    def on_notice(self, run: Trainer, text: str) -> None:
        """It goes on, otherwise."""
        self._write("notice", run.done, text=hidden(text))

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        """It is finished."""
        self._write("end", run.done, wall_seconds=summary["wall_seconds"])

    def on_close(self, run: Trainer) -> None:
        """It is over."""
        if not run.ended:
            self._write("stop", run.done)

    def _write(self, kind: str, step: int, **more: Any) -> None:
        if self.path:
            line = json.dumps({"kind": kind, "time": time.time(), "step": step, **more})
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def facts(run: Trainer) -> dict[str, Any]:
    """What the rows of metrics do not say themselves."""
    outline, tree, settings = run.outline, run.engine.tree, run.settings
    is_tree = set(tree.nodes) <= set(outline.weights) and not outline.over_time
    score = "accuracy" if outline.judges else "loss"
    return {
        "steps": run.total_steps,
        "steps_per_epoch": run.per_epoch,
        "epochs": run.epochs,
        "step_samples": settings.step_samples,
        "N": tree.N,
        "nodes": [[n.n, n.l, n.r, n.level] for n in tree.nodes.values()] if is_tree else [],
        "places": "depth" if outline.over_time else "node",
        "paths": {name: list(path) for name, path in outline.paths.items()},
        "blocks": {name: outline.blocks(path) for name, path in outline.paths.items()},
        "score": "perplexity" if outline.perplexity else score,
        "actors": run.engine.actors if run.engine.spread else 0,
        "dashboard": run.engine.dashboard,
        "process": os.getpid(),
        "host": socket.gethostname(),
    }
