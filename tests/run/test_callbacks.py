"""Callbacks hear of a run in one order, see the trainer, and may end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Result, StopAt, Stopped

from treeprop_ray import config
from treeprop_ray.run import checkpoint
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.trainer import Trainer

WORDS = ["model.hidden=8", "model.blocks=3", "batch=128", "epochs=2", "name=r"]


class Diary(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_start(self, run: Trainer) -> None:
        self.lines.append(f"start {run.start}")

    def on_step(self, run: Trainer, done: int) -> None:
        self.lines.append(f"step {done}")

    def on_epoch(self, run: Trainer, epoch: int, scores: Any) -> None:
        self.lines.append(f"epoch {epoch} {sorted(scores)}")

    def on_checkpoint(self, run: Trainer, done: int, scores: Any) -> None:
        assert run.folder is None or checkpoint.steps(run.folder.storage)[-1] == done
        self.lines.append(f"checkpoint {done}")

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        self.lines.append(f"end {summary['steps']}")


def test_hooks_come_in_order(tmp_path: Path) -> None:
    diary = Diary()
    words = [*WORDS, f"out={tmp_path}", "steps=11"]
    Trainer.of(config.load(words), callbacks=[diary]).train()
    paths = "['full', 'spine-1', 'spine-2']"
    assert diary.lines == [
        "start 0", *(f"step {k}" for k in range(1, 11)), "checkpoint 10", f"epoch 1 {paths}",
        "step 11", "checkpoint 11", f"epoch 1 {paths}", "end 11",
    ]  # fmt: skip


def test_a_run_that_a_callback_ended_is_taken_up(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    words, diary = [*WORDS, f"out={tmp_path}", "checkpoint_every=4"], Diary()
    with pytest.raises(Stopped):
        Trainer.of(config.load(words), callbacks=[diary, StopAt(7)]).train()
    assert diary.lines[-1] == "step 7"  # the others have heard of it
    again = Diary()
    Trainer.of(config.load(words), callbacks=[again]).train()
    assert again.lines[:2] == ["start 4", "step 5"] and again.lines[-1] == "end 20"
