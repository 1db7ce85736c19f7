"""The rows of metrics that a run gives while it goes; loggers (run/loggers.py) write them."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treeprop_ray.core.optim import global_norm
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.scoring import Score
from treeprop_ray.errors import warn
from treeprop_ray.hosts.base import StepReport
from treeprop_ray.methods.outline import Outline
from treeprop_ray.run import checkpoint
from treeprop_ray.run.files import write_whole


class MetricsFile:
    """metrics.csv: fixed columns; on resume, rows after the checkpoint are cut off.

    A full disk does not end the run: the row is left out, whole, with one warning.
    """

    def __init__(self, path: Path, columns: Sequence[str], step: int) -> None:
        self.path, self._columns, self._warned = path, columns, False
        kept = read_rows(path) if step > 0 and path.is_file() else []
        kept = [row for row in kept if int(row["step"]) <= step]
        write_whole(path, self._text([dict(zip(columns, columns, strict=True)), *kept]))
        self._file = path.open("ab", buffering=0)

    def _text(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns, extrasaction="ignore", restval="").writerows(rows)
        return text.getvalue()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; it is on disk when this returns."""
        shown = {k: f"{v:.8g}" if isinstance(v, float) else v for k, v in row.items()}
        data, end = self._text([shown]).encode(), os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            if not self._warned:
                warn(f"{self.path}: {e.strerror}; rows are missing from step {row['step']} on")
            self._warned = True

    def close(self) -> None:
        """No more rows."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, str]]:
    """The whole rows of a file of metrics, in which a killed writer or a full disk may have left
    a torn one; how many are left out is said."""
    text = path.read_bytes().decode(errors="replace").replace("\0", "\ufffd")
    lines = text.splitlines(keepends=True)
    torn = bool(lines) and not lines[-1].endswith("\n")
    try:
        header, *cells = csv.reader(lines[: len(lines) - torn])
    except (ValueError, csv.Error):
        header, cells = [], []
    rows = [dict(zip(header, row, strict=True)) for row in cells if len(row) == len(header)]
    whole = [row for row in rows if checkpoint.is_step(row.get("step", ""))]
    if missing := len(cells) - len(whole) + torn:
        warn(f"{path}: is damaged; {missing} of its lines are left out")
    elif lines and "step" not in header:
        warn(f"{path}: is damaged and begins anew")
    return whole


class Log:
    """Makes rows, gives each to `emit`, and keeps them and what is shown."""

    def __init__(
        self,
        emit: Callable[[Mapping[str, Any]], None],
        outline: Outline,
        step: int,
        optimizer: OptimizerRule,
        metrics: Sequence[str] = (),
    ) -> None:
        self.columns = [
            "kind", "step", "epoch", "loss", "grad_norm", "lr", "step_seconds", "data_share",
            "clean_ce", "tree_ce", "leak", *outline.columns, "test_accuracy", "test_loss",
            *(f"{metric}/{path}" for path in outline.paths for metric in metrics),
            "correction_ratio",
        ]  # fmt: skip
        self.outline, self.optimizer = outline, optimizer
        self.emit = emit
        self.rows: list[dict[str, Any]] = []  # of this process; a run taken up has earlier ones
        self.loss = float("nan")
        self.leak: float | None = None
        self.ratio: float | None = None
        self.ratios: dict[int, float] = {}  # by node
        self._warned = False
        self._last = (time.perf_counter(), step)
        self._data_seconds = 0.0

    def step(
        self,
        step: int,
        epoch: int,
        reports: Sequence[StepReport],
        clean: float | None,
    ) -> None:
        """A row of one step: losses by node, gradient norm, learning rate, seconds per step and
        the share of them that went into getting the training batch."""
        row: dict[str, Any] = {"kind": "step", "step": step, "epoch": epoch}
        losses: dict[int, dict[str, float]] = {}
        for report in reports:
            for n, terms in report.losses.items():
                mine = losses.setdefault(n, {})
                for name, value in terms.items():  # several actors may have a share of one term
                    mine[name] = mine.get(name, 0.0) + value
        total = 0.0
        for n, terms in sorted(losses.items()):
            row.update({f"{name}/{n}": value for name, value in terms.items()})
            row[f"loss/{n}"] = sum(self.outline.weights[n][t] * v for t, v in terms.items())
            total += row[f"loss/{n}"]
        if self.outline.clean:
            row["correction_ratio"] = self._ratio(reports)
        now = time.perf_counter()
        row["loss"] = self.loss = total
        row["grad_norm"] = global_norm(r.square_norms for r in reports)
        row["lr"] = self.optimizer.lr_at(step - 1)
        row["step_seconds"] = (now - self._last[0]) / max(1, step - self._last[1])
        data_seconds = sum(r.data_seconds for r in reports)
        spent = data_seconds - self._data_seconds
        if spent < 0:  # an actor that was made anew has begun to count from zero
            spent = data_seconds
        row["data_share"] = spent / (now - self._last[0])
        self._last, self._data_seconds = (now, step), data_seconds
        # absent if cross-entropy has no weight
        tree_ce = losses.get(self.outline.clean[1], {}).get("ce") if self.outline.clean else None
        if clean is not None and tree_ce is not None:
            row["clean_ce"], row["tree_ce"] = clean, tree_ce
            leak: float = row["clean_ce"] - row["tree_ce"]
            row["leak"] = self.leak = leak
            self._warn(leak, row["tree_ce"])
        self._write(row)

    def _ratio(self, reports: Sequence[StepReport]) -> float:
        """|beta * correction| / |mu_fwd| over all nodes and samples; 0 where there is none."""
        sizes = dict(sorted(item for report in reports for item in report.sizes.items()))
        push = {n: each["correction"] for n, each in sizes.items()}
        state = {n: each["mu_fwd"] for n, each in sizes.items()}
        self.ratios = {n: math.sqrt(push[n] / state[n]) if state[n] else 0.0 for n in sizes}
        whole = sum(state.values())
        self.ratio = math.sqrt(sum(push.values()) / whole) if whole else 0.0
        return self.ratio

    def _warn(self, leak: float, tree_ce: float) -> None:
        """Once, when the tree predicts much better than the clean path can: labels leak."""
        if not self._warned and leak > max(0.5, tree_ce):
            self._warned = True
            warn(
                f"label leak: the clean spine path has {leak:.2f} more cross-entropy than the tree "
                "on the same batch; the correction writes labels into the states (lower beta or "
                "correction_scale, or use correction=mean)"
            )

    def epoch(
        self, step: int, epoch: int, scores: Mapping[str, Score], test: Mapping[str, float]
    ) -> None:
        """A row of validation scores, and of the full chain's test figures where there are any."""
        row: dict[str, Any] = {"kind": "epoch", "step": step, "epoch": epoch}
        for name, score in scores.items():
            row[f"val_loss/{name}"] = score.loss
            row.update({f"{metric}/{name}": value for metric, value in score.own.items()})
            if self.outline.judges:
                row[f"accuracy/{name}"] = score.accuracy
        row.update({f"test_{k}": v for k, v in test.items() if k in ("accuracy", "loss")})
        self._write(row)
        self._last = (time.perf_counter(), step)

    def pause(self, seconds: float) -> None:
        """Seconds that went into something else than steps."""
        self._last = (self._last[0] + seconds, self._last[1])

    def _write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.emit(row)
