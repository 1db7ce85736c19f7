"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """`advance` moves the bar, `line` says something that stays."""

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

    def advance(self, status: str = "") -> None:
        """One step done; `status` (if any) replaces the text behind the bar."""
        if self._progress:
            self._progress.update(self._task, advance=1)
            if status:
                self._progress.update(self._task, status=status)

    def line(self, text: str) -> None:
        """A line that stays on the screen or in the log."""
        if self._progress:
            self._progress.update(self._task, status=text.partition("  ")[2] or text)
        else:
            print(text, flush=True)
