"""Everything in this process: the oracle for every other engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from treeprop_ray.core import devices
from treeprop_ray.core.rule import HeldOut, cut
from treeprop_ray.engine.base import Engine
from treeprop_ray.errors import UserError, told_at
from treeprop_ray.hosts.base import State, StepReport
from treeprop_ray.methods import Job
from treeprop_ray.schedule.ops import STEP, Call
from treeprop_ray.schedule.placement import alone


class LocalEngine(Engine):
    """One host that owns the whole network and runs the schedule call by call."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        torch.set_num_threads(job.settings.threads)
        self.plan = alone(job.tree, pick_device(job.settings.device))
        try:
            self.host = job.method.host(job, self.plan, 0)
        except Exception as e:
            raise told_at("the network cannot be made", e) from e
        self.calls = job.method.calls(job, self.plan)
        self.passes = {STEP: self.calls, **job.method.other_calls(job, self.plan)}
        self._last = StepReport()

    def gradients(self, step: int) -> None:
        """The forward and backward waves of a step; gradients stay in the parameters."""
        self._run(self.passes[self.job.pass_at(step)], step)

    def _run(self, calls: Sequence[Call], at: int | HeldOut) -> None:
        pieces = cut(at, self.job.places, self.job.settings.pieces)
        for call in calls:
            try:
                self.host.run(call, pieces[call.piece], {})
            except Exception as e:
                where = self.host.at or f"{call.phase}, level {call.level}"
                raise told_at(f"{where}, step {at}", e) from e

    def _step(self, step: int, report: bool) -> None:
        self.gradients(step)
        self._last = self.host.report(step, norms=report or self._needs_norms)
        self.host.apply(step, [self._last.square_norms])

    @property
    def _needs_norms(self) -> bool:
        return self.job.optimizer.clip > 0 or self.job.optimizer.scaled

    def _reports(self) -> list[StepReport]:
        return [self._last]

    def ask(self, host: int, verb: Callable[..., Any], *words: Any, returns: int = 1) -> Any:
        return verb(self.host, *words)

    def get(self, answers: Sequence[Any]) -> list[Any]:
        return list(answers)

    def submit(self, name: str, at: HeldOut) -> None:
        self._run(self.passes[name], at)

    def state(self) -> State:
        return self.host.state()

    def close(self) -> None:
        """The modules may be the user's: they are left uncompiled."""
        if self.host.batches:
            self.host.batches.close()
        if self.host.compiled:
            self.host.compiled.stop()

    def load(self, state: State, step: int = 0) -> None:
        self.host.load(*state)


def pick_device(device: str) -> str:
    """`auto` is a GPU when there is one."""
    if device == devices.NAME and not devices.gpus.available():
        raise UserError("device=cuda: this machine has no usable GPU; use device=cpu or auto")
    if device == "auto":
        return devices.NAME if devices.gpus.available() else "cpu"
    return device
