"""Callbacks: what hears of a run while it goes. The probe, figures, Tune's reports are some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeprop_ray.config.names import imported
from treeprop_ray.core.scoring import Score
from treeprop_ray.errors import UserError, first_line, told_at

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

    def _each(self, call: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            call(callback)

    def on_start(self, run: Trainer) -> None:
        self._each(lambda callback: callback.on_start(run))

    def on_step(self, run: Trainer, done: int) -> None:
        self._each(lambda callback: callback.on_step(run, done))

    def on_epoch(self, run: Trainer, epoch: int, scores: Scores) -> None:
        self._each(lambda callback: callback.on_epoch(run, epoch, scores))

    def on_checkpoint(self, run: Trainer, done: int, scores: Scores) -> None:
        self._each(lambda callback: callback.on_checkpoint(run, done, scores))

    def on_row(self, run: Trainer, row: Mapping[str, Any]) -> None:
        self._each(lambda callback: callback.on_row(run, row))

    def on_notice(self, run: Trainer, text: str) -> None:
        self._each(lambda callback: callback.on_notice(run, text))

    def on_close(self, run: Trainer) -> None:
        self._each(lambda callback: callback.on_close(run))

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        self._each(lambda callback: callback.on_end(run, summary))


class Named(Together):
    """A callback that `callbacks=[…]` names: its errors name it and the line of its own code."""

    def __init__(self, name: str, callback: Callback) -> None:
        super().__init__([callback])
        self.name = name

    def _each(self, call: Callable[[Callback], None]) -> None:
        try:
            super()._each(call)
        except Exception as e:  # the user's own code may raise anything
            raise told_at(f"callbacks={self.name}", e) from e


def callbacks_of(names: Sequence[str]) -> list[Callback]:
    """The callbacks that a setting names, made anew."""
    return [Named(name, _made(name)) for name in names]


def _made(name: str) -> Callback:
    factory = imported("callbacks", name)
    try:
        callback = factory()
    except Exception as e:  # the user's own code may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"callbacks={name}: factory() failed: {reason}") from e
    if not isinstance(callback, Callback):
        kind = type(callback).__name__
        raise UserError(f"callbacks={name}: gives {kind}, must give a treeprop_ray.Callback")
    return callback
