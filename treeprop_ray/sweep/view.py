"""How a sweep goes: a table of running trials on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from treeprop_ray.sweep.plan import Trial
from treeprop_ray.sweep.rows import figure, flat, value_of


class View:
    """Is told what happens; shows running trials and says a line when one starts or ends."""

    def __init__(
        self, name: str, total: int, done: int, metric: str, console: Console | None = None
    ) -> None:
        self.name, self.total, self.done, self.metric = name, total, done, metric
        self.console = console or Console()
        self.running: dict[str, tuple[Trial, int, float | None, float]] = {}
        self._began, self._done_before = time.monotonic(), done
        self._live: Live | None = None

    def __enter__(self) -> View:
        left = f", {self.done} done before" if self.done else ""
        self._say(f"sweep {self.name}: {self.total} trials{left}")
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self.table, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def start(self, trial: Trial) -> None:
        """A trial begins; here is how to run it alone."""
        self.running[trial.settings.name] = (trial, 0, None, time.monotonic())
        self._say(f"start {trial.text}: {trial.command}")

    def result(self, trial: Trial, epoch: int, score: float) -> None:
        """An evaluation of a running trial."""
        began = self.running.get(trial.settings.name, (trial, 0, None, time.monotonic()))[3]
        self.running[trial.settings.name] = (trial, epoch, score, began)

    def finished(self, trial: Trial, summary: Mapping[str, Any]) -> None:
        """A trial has its summary."""
        value = value_of(self.metric, flat(summary))
        shown = figure(self.metric, value) if value is not None else "no such metric"
        self._end(trial, f"{self.metric} {shown}, {summary['wall_seconds']:.1f} s")

    def paused(self, trial: Trial) -> None:
        """A member of a population waits for the others."""
        self.running.pop(trial.settings.name, None)

    def stopped(self, trial: Trial, epoch: int) -> None:
        """The scheduler has ended a trial early."""
        self._end(trial, f"stopped by the scheduler after epoch {epoch}")

    def failed(self, trial: Trial, reason: str) -> None:
        """A trial has failed; the others go on."""
        self._end(trial, f"failed: {reason}")

    def _end(self, trial: Trial, text: str) -> None:
        self.running.pop(trial.settings.name, None)
        self.done += 1
        self._say(f"[{self.done}/{self.total}] {trial.text}: {text}{self.left()}")

    def left(self) -> str:
        """Time left, from the share of the work that is done."""
        part = sum(epoch / t.settings.epochs for t, epoch, _, _ in self.running.values())
        work = self.done - self._done_before + part
        if work == 0 or self.done >= self.total:
            return ""
        seconds = (time.monotonic() - self._began) / work * (self.total - self.done - part)
        return f", ETA {clock(seconds)}"

    def table(self) -> Table:
        """What the terminal shows."""
        table = Table(title=f"{self.name}: {self.done}/{self.total}{self.left()}", title_style="")
        for column in ("trial", "epoch", f"validation, {self.metric.partition('/')[2]}", "ETA"):
            table.add_column(column)
        for trial, epoch, score, began in self.running.values():
            spent = time.monotonic() - began
            eta = clock(spent / epoch * (trial.settings.epochs - epoch)) if epoch else ""
            shown = figure(self.metric, score) if score is not None else ""
            table.add_row(trial.text, f"{epoch}/{trial.settings.epochs}", shown, eta)
        return table

    def _say(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
