"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from treeprop_ray.errors import Terminated


class Bar:
    """`advance` moves the bar, `line` says how it stands.

    Python drops a KeyboardInterrupt that arises inside a destructor, of which a run has many; so
    Ctrl-C is also remembered, and `advance` raises it again. SIGTERM is only remembered, so that
    the step under way comes to its end; a second one is not waited for.
    """

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self.console = Console()
        self._interrupted = False
        self._handlers: dict[signal.Signals, Any] = {}
        self.terminated = False  # by SIGTERM
        self._progress: Progress | None = None
        if self.console.is_terminal and not self.console.is_jupyter:  # a notebook keeps lines
            self._progress = Progress(
                TextColumn(title),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=self.console,
            )
            self._task = self._progress.add_task(title, total=total, completed=done, status="")

    def __enter__(self) -> Bar:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt),
                signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminate),
            }
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress:
            self._progress.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.terminated:
            raise Terminated
        self.terminated = True

    def advance(self) -> None:
        """One step done."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self._progress:
            self._progress.update(self._task, advance=1)

    def line(self, text: str, short: str) -> None:
        """How it stands: `short` behind the bar, or the whole text as a line of its own."""
        if self._progress:
            self._progress.update(self._task, status=short)
        else:
            print(text, flush=True)
