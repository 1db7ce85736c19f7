"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """`advance` moves the bar, `line` says how it stands."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self.console = Console()
        self._progress: Progress | None = None
        if self.console.is_terminal:
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

    def advance(self) -> None:
        """One step done."""
        if self._progress:
            self._progress.update(self._task, advance=1)

    def line(self, text: str, short: str) -> None:
        """How it stands: `short` behind the bar, or the whole text as a line of its own."""
        if self._progress:
            self._progress.update(self._task, status=short)
        else:
            print(text, flush=True)
