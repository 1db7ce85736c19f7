"""Own metrics and callbacks as a user writes them: named by settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from treeprop_ray import Callback

NUMBER = 3


def sure(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.softmax(-1).amax(-1).mean()


def misses(most: int = 10) -> Callable[[Tensor, Tensor], float]:
    return lambda outputs, targets: min(most, int((outputs.argmax(-1) != targets).sum()))


class Seen:
    """As an object of torchmetrics has it: batch after batch."""

    def reset(self) -> None:
        self.count = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.count += len(targets)

    def compute(self) -> int:
        return self.count


class Diary(Callback):
    """Writes what it hears of into the run folder."""

    def _write(self, run: Any, line: str) -> None:
        with (run.folder.path / "diary").open("a") as f:
            f.write(f"{line}\n")

    def on_start(self, run: Any) -> None:
        self._write(run, f"start {run.start}")

    def on_epoch(self, run: Any, epoch: int, scores: Any) -> None:
        self._write(run, f"epoch {epoch} {scores['full'].own}")

    def on_end(self, run: Any, summary: dict[str, Any]) -> None:
        self._write(run, f"end {summary['steps']}")


class Falls(Callback):
    """At step 8, the first time."""

    def on_step(self, run: Any, done: int) -> None:
        once = Path(run.folder.path / "fallen")
        if done == 8 and not once.exists():
            once.touch()
            raise ValueError("eight is too much")


def fails() -> Callback:
    raise ValueError("not today")


def loss(outputs: Tensor, targets: Tensor) -> float:
    return 0.0


def three(a: Any, b: Any, c: Any) -> None: ...


def number() -> int:
    return NUMBER
