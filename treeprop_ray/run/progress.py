"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from treeprop_ray.errors import Terminated, signals
from treeprop_ray.methods.outline import Outline
from treeprop_ray.run.callbacks import Scores

WIDE, WIDER = 100, 120  # columns of a terminal that has room for the name, and for steps too


class Pace(ProgressColumn):
    """Samples per second and the time left."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples  # of a step

    def render(self, task: Task) -> Text:
        """Nothing before a speed is known."""
        if not (speed := task.finished_speed or task.speed):
            return Text("")
        rate = f"{speed * self.samples:,.0f} samples/s"
        left = f"  {clock(task.remaining / speed)} left" if task.remaining else ""
        return Text(f"{rate}{left}")


def clock(seconds: float) -> str:
    """0:42, 12:05, 3:12:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def standing(epoch: str, loss: float, scores: Scores, outline: Outline) -> tuple[str, str]:
    """A line for an epoch; in short the deployed chain and the longest of the other paths."""
    line, short = f"{epoch}  loss {loss:.4f}", f"loss {loss:.3f}"
    if scores:
        texts = [f"{name} {outline.show(score).strip()}" for name, score in scores.items()]
        line = f"{line}  val {'  '.join(texts)}"
        names = ["full", *[name for name in scores if name != "full"][-1:]]
        short = "val " + " · ".join(
            f"{name} {outline.show(scores[name], digits=1).strip()}" for name in names
        )
    return line, short


class Bar:
    """`advance` moves the bar, `line` says how it stands.

    Python drops a KeyboardInterrupt that arises inside a destructor, of which a run has many; so
    Ctrl-C is also remembered, and `advance` raises it again. SIGTERM is only remembered, so that
    the step under way comes to its end; a second one is not waited for.
    """

    def __init__(
        self,
        title: str,
        total: int,
        done: int = 0,
        samples: int = 1,
        epochs: tuple[int, int] = (1, 1),
        console: Console | None = None,
    ) -> None:
        """`samples` of a step; `epochs`: steps of one, and their number."""
        self.console = console or Console()
        self.epochs = epochs
        self._interrupted = False
        self._handlers: dict[signal.Signals, Any] = {}
        self.terminated = False  # by SIGTERM
        self._progress: Progress | None = None
        if self.console.is_terminal and not self.console.is_jupyter:  # a notebook keeps lines
            width = self.console.width
            columns: list[ProgressColumn] = [
                *([TextColumn("{task.description}", markup=False)] if width >= WIDE else []),
                TextColumn("{task.fields[epoch]}"),
                BarColumn(20 if width >= WIDER else 8 if width >= WIDE else 6),
                *([MofNCompleteColumn()] if width >= WIDER else []),
                Pace(samples),
                TextColumn("{task.fields[status]}", markup=False),
            ]
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task(
                title, total=total, completed=done, status="", epoch=self._epoch(done)
            )

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
        if self._interrupted or not signals.importing(frame):
            self._interrupted = True
            raise KeyboardInterrupt
        self._interrupted = True  # in the middle of an import it may become any error

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.terminated:
            raise Terminated
        self.terminated = True

    def _epoch(self, done: int) -> str:
        """The epoch that is under way."""
        steps, epochs = self.epochs
        return f"epoch {min(done // steps + 1, epochs)}/{epochs}"

    def advance(self) -> None:
        """One step done."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self._progress:
            task = self._progress.tasks[0]
            epoch = self._epoch(int(task.completed) + 1)
            self._progress.update(self._task, advance=1, epoch=epoch)

    def line(self, text: str, short: str) -> None:
        """How it stands: a line that stays, and `short` beside the bar."""
        if self._progress:
            self._progress.update(self._task, status=short)
            self._progress.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)
