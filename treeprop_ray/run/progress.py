"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """`advance` moves the bar, `line` says how it stands.

    Python drops a KeyboardInterrupt that arises inside a destructor, of which a run has many; so
    Ctrl-C is also remembered, and `advance` raises it again.
    """

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self.console = Console()
        self._interrupted = False
        self._handler: Any = None
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
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
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
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

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
