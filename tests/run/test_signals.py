"""SIGTERM: the step is finished and kept, one line, code 143; the same command goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Result

from treeprop_ray import config
from treeprop_ray.errors import Terminated, TrainingError
from treeprop_ray.run import checkpoint
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.trainer import Trainer

Command = Callable[..., Result]
SMALL = ["model.hidden=8", "model.blocks=3", "batch=128", "steps=9", "checkpoint_every=4", "name=r",
         "loggers=[]", "keep_best=false"]  # fmt: skip


class Signal(Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.at, self.times = at, times

    def on_step(self, run: Trainer, done: int) -> None:
        for _ in range(self.times if done == self.at else 0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)


@pytest.mark.parametrize("at", [3, 4])
def test_sigterm_keeps_the_step_and_the_same_command_goes_on(
    tmp_path: Path, at: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("treeprop_ray.reporting.callbacks.standard", lambda s: [Signal(at)])
    words = [*SMALL, f"out={tmp_path / 'a'}"]
    ended = command("train", *words)
    assert ended.code == 143 and len(ended.error_lines) == 1, ended.err
    last = tmp_path / "a/r/checkpoints" / checkpoint.name_of(at)
    assert ended.err.strip() == f"terminated; the same command continues from {last}"
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.undo()
    again = command("train", *words)
    assert again.code == 0 and f"(step {at} of 9)" in again.out
    Trainer.of(config.load([*SMALL, f"out={tmp_path / 'b'}"])).train()
    mine, theirs = (checkpoint.load(tmp_path / k / "r/checkpoints", 9) for k in "ab")
    assert all(torch.equal(mine.weights[k], v) for k, v in theirs.weights.items())
    assert all(torch.equal(mine.optimizer[k], v) for k, v in theirs.optimizer.items())


def test_a_second_sigterm_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(Terminated) as caught:
        Trainer.of(config.load([*SMALL, f"out={tmp_path}"]), callbacks=[Signal(6, times=2)]).train()
    assert caught.value.code == 143
    assert caught.value.saved.endswith("step-00000004")  # the one before: step 6 was not kept


def test_a_lost_disk_ends_the_run_with_the_last_checkpoint(tmp_path: Path) -> None:
    class Lost(Callback):
        def on_step(self, run: Trainer, done: int) -> None:
            if done == 6:
                raise OSError(5, "Input/output error", "figures/x.png")

    with pytest.raises(TrainingError, match=r"Input/output error.*; last checkpoint: .*00000004$"):
        Trainer.of(config.load([*SMALL, f"out={tmp_path}"]), callbacks=[Lost()]).train()
