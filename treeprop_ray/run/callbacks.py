"""Callbacks: what hears of a run while it goes. The probe, figures, Tune's reports are some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeprop_ray.core.scoring import Score

if TYPE_CHECKING:
    from treeprop_ray.run.trainer import Trainer

Scores = Mapping[str, Score]  # by path


class Callback:
    """Every hook gets the trainer, whose engine, log and folder are at hand. All do nothing here.

    An exception ends the run; the last checkpoint stays. `run.stop("why")` ends it after the step
    under way, as a finished run with a summary.
    """

    def on_start(self, run: Trainer) -> None:
        """The engine stands, an earlier run has been taken up; the first step is `run.start`."""

    def on_step(self, run: Trainer, done: int) -> None:
        """After `done` steps of the whole run; the checkpoint of this step is not written yet."""

    def on_epoch(self, run: Trainer, epoch: int, scores: Scores) -> None:
        """After an evaluation on the validation split, and the checkpoint of its step."""

    def on_checkpoint(self, run: Trainer, done: int, scores: Scores) -> None:
        """A checkpoint has been written (or would have been, in a run without a folder)."""

    def on_row(self, run: Trainer, row: Mapping[str, Any]) -> None:
        """A row of metrics: `kind` (step or epoch), `step`, `epoch`, and figures by name."""

    def on_notice(self, run: Trainer, text: str) -> None:
        """Something has happened to the run, in one line: actors were lost, others go on."""

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        """The run is at its end and its summary is written; the engine still stands."""

    def on_close(self, run: Trainer) -> None:
        """The run is over, at its end or by an error; also for a callback that never started."""


class Together(Callback):
    """Several callbacks, one after the other."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_start(self, run: Trainer) -> None:
        for callback in self.callbacks:
            callback.on_start(run)

    def on_step(self, run: Trainer, done: int) -> None:
        for callback in self.callbacks:
            callback.on_step(run, done)

    def on_epoch(self, run: Trainer, epoch: int, scores: Scores) -> None:
        for callback in self.callbacks:
            callback.on_epoch(run, epoch, scores)

    def on_checkpoint(self, run: Trainer, done: int, scores: Scores) -> None:
        for callback in self.callbacks:
            callback.on_checkpoint(run, done, scores)

    def on_row(self, run: Trainer, row: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_row(run, row)

    def on_notice(self, run: Trainer, text: str) -> None:
        for callback in self.callbacks:
            callback.on_notice(run, text)

    def on_close(self, run: Trainer) -> None:
        for callback in self.callbacks:
            callback.on_close(run)

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_end(run, summary)
