"""A run as it stands now, read from its folder again and again: only what was appended is read."""

from __future__ import annotations

import csv
import json
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treeprop_ray.config import Settings, hidden
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.probe_row import WHOLE
from treeprop_ray.reporting.page import subtitle
from treeprop_ray.reporting.timeline import TIMELINE, last_step
from treeprop_ray.run import events
from treeprop_ray.run.folder import read_summary, run_settings

POINTS = 2000  # of a curve in one answer
RECENT = 20  # rows over which the pace is taken
CURVES = ("kind", "step", "loss", "step_seconds")
NOTICES = 50  # that are shown; the first event is the start of the run


class Tail:
    """The whole lines of a growing file. One that is replaced or has shrunk is read anew."""

    def __init__(self, path: Path) -> None:
        self.path, self.place, self.read = path, "", 0

    def lines(self) -> tuple[bool, list[str]]:
        """Whether it began anew, and the lines since; a torn last one waits for its rest."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                place = f"{stat.st_dev}-{stat.st_ino}"
                anew = place != self.place or stat.st_size < self.read
                if anew:
                    self.place, self.read = place, 0
                file.seek(self.read)
                data = file.read()
        except OSError:  # not there yet, or just being replaced
            return False, []
        whole = data[: data.rfind(b"\n") + 1]
        self.read += len(whole)
        return anew, whole.decode(errors="replace").replace("\0", "\ufffd").splitlines()


@dataclass
class Rows:
    """The whole rows of a growing CSV file, as numbers where they are numbers. Of a step only what
    curves need is kept, and the last one whole: a long run has many."""

    tail: Tail
    header: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)  # step

    def refresh(self) -> None:
        """Read what has been appended."""
        anew, lines = self.tail.lines()
        if anew:
            self.header, self.rows, self.last = [], [], {}
        for cells in csv.reader(lines):
            if not self.header:
                self.header = cells
            elif len(cells) == len(self.header) and (row := row_of(self.header, cells)):
                if row.get("kind") == "step":
                    self.last, row = row, {key: row[key] for key in CURVES if key in row}
                self.rows.append(row)


class Live:
    """What the page of a run shows."""

    def __init__(self, run: str) -> None:
        self.settings: Settings = run_settings(run)
        self.run, self.folder = run, Path(run).resolve()
        if "csv" not in self.settings.loggers:
            raise UserError(f"run={run}: writes no metrics.csv (loggers= leaves it out)")
        self.metrics = Rows(Tail(self.folder / "metrics.csv"))
        self.probe = Rows(Tail(self.folder / "probe.csv"))
        self.log = Tail(self.folder / events.NAME)
        self.events: list[dict[str, Any]] = []

    def now(self, place: str = "", known: int = 0, waves: str = "") -> dict[str, Any]:
        """How it stands. Curves begin after the `known` rows, if metrics.csv is still the file of
        that `place`; waves are left out if they are still those of the mark `waves`."""
        self.metrics.refresh()
        self.probe.refresh()
        self._refresh_events()
        rows = self.metrics.rows
        known = known if place == self.metrics.tail.place and known <= len(rows) else 0
        facts: dict[str, Any] = next((e for e in reversed(self.events) if e["kind"] == "start"), {})
        steps = [row for row in rows[known:] if row.get("kind") == "step"]
        epochs = [row for row in rows[known:] if row.get("kind") == "epoch"]
        mark, drawn = self._waves(waves)
        answer = {
            "name": self.folder.name,
            "subtitle": self._subtitle(),
            "place": self.metrics.tail.place,
            "known": len(rows),
            "anew": known == 0,
            "facts": facts,
            "state": state(self.events, (self.folder / "summary.json").is_file()),
            "pace": pace(rows, facts),
            "curve": [[row.get(key) for key in CURVES[1:]] for row in thinned(steps)],
            "scores": [[row.get("epoch"), scores(row, facts)] for row in thinned(epochs)],
            "best": best(rows, facts),
            "last": by_place(self.metrics.last),
            "probe": self._probe(),
            "mark": mark,
            "waves": drawn,
            "notices": self.events[1:][-NOTICES:],
            "recoveries": sum(str(e.get("text", "")).startswith("lost ") for e in self.events),
        }
        shown: dict[str, Any] = finite(answer)
        return shown

    def _refresh_events(self) -> None:
        anew, lines = self.log.lines()
        if anew:
            self.events = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and {"kind", "time", "step"} <= event.keys():
                self.events.append(event)

    def _subtitle(self) -> str:
        try:
            return subtitle(self.settings, read_summary(self.folder))
        except UserError:  # not finished
            return subtitle(self.settings, None)

    def _probe(self) -> dict[str, Any]:
        rows = self.probe.rows
        if not rows:
            return {}
        last = rows[-1]
        blocks = {k.partition("/")[2]: v for k, v in last.items() if k.startswith("cosine/")}
        keys = ("step", "cosine")
        return {
            "curve": [[row.get(key) for key in keys] for row in thinned(rows)],
            "blocks": blocks,
            "whole": {key: last[key] for key in WHOLE if key in last},
            "step": last.get("step"),
        }

    def _waves(self, seen: str) -> tuple[str, dict[str, Any] | None]:
        path = self.folder / TIMELINE
        try:
            mark = str(path.stat().st_mtime_ns)
            return mark, None if mark == seen else last_step(json.loads(path.read_text()))
        except (OSError, ValueError, LookupError, TypeError):  # none yet, or damaged
            return "", None


def row_of(header: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    """The figures of a line by their columns; nothing of one that is damaged."""
    row: dict[str, Any] = {}
    for key, cell in zip(header, cells, strict=True):
        try:
            row[key] = int(cell) if cell.isdecimal() else float(cell)
        except ValueError:  # empty, or not a number
            if key == "kind":
                row[key] = cell
    return row if isinstance(row.get("step"), int) else {}


def finite(value: Any) -> Any:
    """The same without numbers that JSON does not know, and without secrets in texts."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    if isinstance(value, str):
        return hidden(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `POINTS` rows, evenly; the last one is among them."""
    stride = -(-len(rows) // POINTS) or 1
    return [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % stride == 0]


def scores(row: dict[str, Any], facts: dict[str, Any]) -> dict[str, float]:
    """The score of every path in a row of an evaluation."""
    judged = facts.get("score", "accuracy") == "accuracy"
    prefix = "accuracy/" if judged else "val_loss/"
    by_path = {k.partition("/")[2]: v for k, v in row.items() if k.startswith(prefix)}
    if facts.get("score") == "perplexity":
        return {k: math.exp(min(v, 700.0)) for k, v in by_path.items()}
    return by_path


def best(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """The epoch in which the deployed chain was best on validation."""
    judged = [(scores(r, facts), r) for r in rows if r.get("kind") == "epoch"]
    known = [(by_path["full"], r["epoch"]) for by_path, r in judged if "full" in by_path]
    if not known:
        return {}
    sign = 1 if facts.get("score", "accuracy") == "accuracy" else -1
    score, epoch = max(known, key=lambda pair: sign * pair[0])
    return {"score": score, "epoch": epoch}


def by_place(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a step: whole figures, and the loss terms of every place."""
    places: dict[str, dict[str, Any]] = {}
    for key, value in row.items():
        term, _, place = key.partition("/")
        if place:
            places.setdefault(place, {})[term] = value
    return {**{k: v for k, v in row.items() if "/" not in k}, "places": places}


def pace(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step, samples per second and seconds left, by the last rows."""
    steps = [r for r in rows[-2 * RECENT :] if r.get("kind") == "step" and "step_seconds" in r]
    each = sum(r["step_seconds"] for r in steps) / max(1, len(steps))
    if not each or not facts:
        return {}
    left = max(0, facts.get("steps", 0) - steps[-1]["step"])
    return {"step": each, "samples": facts.get("step_samples", 0) / each, "left": left * each}


def state(log: Sequence[dict[str, Any]], summary: bool) -> str:
    """waiting, running, finished, stopped; lost: its process is gone without a word."""
    marks = [e for e in log if e["kind"] in ("start", "end", "stop")]
    if not marks:
        return "finished" if summary else "waiting"
    last = marks[-1]
    if last["kind"] != "start":
        return "finished" if last["kind"] == "end" else "stopped"
    here = last.get("host") == socket.gethostname()
    return "lost" if here and not alive(last.get("process")) else "running"


def alive(process: Any) -> bool:
    """Whether a process of this machine lives; one that cannot be asked does."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, TypeError, OverflowError):
        return True
    return True
