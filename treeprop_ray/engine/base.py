"""An engine takes the hosts of a job through the steps of a run, in this process or in actors.

What depends on where the hosts live is abstract here; scores and the probe are the same procedures
everywhere, over `ask` and `get`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from treeprop_ray.core.rule import HeldOut
from treeprop_ray.core.scoring import Score
from treeprop_ray.data import Scoring, Training, Which
from treeprop_ray.hosts.base import Host, State, StepReport
from treeprop_ray.hosts.probe import turn
from treeprop_ray.hosts.probe_row import combine
from treeprop_ray.methods import Job
from treeprop_ray.schedule.placement import Plan
from treeprop_ray.schedule.probe import probe_parts

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Span:
    """When an actor ran a call, for the timeline."""

    actor: str
    phase: str
    level: int
    piece: int
    step: int
    begin: float  # seconds since the epoch
    end: float


def shapes_of(host: Host) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of a host's weights and buffers."""
    kinds = {
        k: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in host.shapes().items()
    }
    return kinds


class Saving(Protocol):
    """The state after `step` steps, which hosts are storing while training goes on."""

    step: int

    def begin(self) -> None:
        """Have all hosts store what they have now."""

    def arrived(self, wait: bool) -> bool:
        """Whether all of it is stored; `wait`: until it is."""


class Engine(ABC):
    """Trains one network. Steps are numbered from 0 over the whole run."""

    plan: Plan
    spread = False  # whether its state is in several processes

    def __init__(self, job: Job) -> None:
        self.job, self.tree, self.method = job, job.tree, job.method
        self._besides: list[StepReport] = []  # what the method reports besides its hosts

    # -- steps --------------------------------------------------------------------------------

    def step(self, step: int, report: bool) -> None:
        """Do (or submit) one training step; with `report` gradient norms are taken too."""
        self._step(step, report)
        self._besides = self.method.after_step(self, step)

    @abstractmethod
    def _step(self, step: int, report: bool) -> None:
        """The calls of a step, and the update."""

    def reports(self) -> list[StepReport]:
        """The reports of the hosts for the last step (waits for it)."""
        return [*self._reports(), *self._besides]

    @abstractmethod
    def _reports(self) -> list[StepReport]: ...

    @abstractmethod
    def state(self) -> State:
        """Weights and optimizer state after the last step, keyed by part."""

    @abstractmethod
    def load(self, state: State, step: int = 0) -> None:
        """Take up a state that an earlier run had before `step`."""

    def shapes(self) -> dict[str, Tensor]:
        """All weights and buffers as tensors without numbers."""
        hosts = range(len(self.plan.names))
        told = self.guarded(lambda: self.get([self.ask(h, shapes_of) for h in hosts]))
        pairs = sorted(pair for part in told for pair in part.items())
        return {
            key: torch.empty(shape, dtype=getattr(torch, kind), device="meta")
            for key, (shape, kind) in pairs
        }

    @property
    def actors(self) -> int:
        """Hosts that may have a state to tell, copies too."""
        return len(self.plan.actors)

    def take_up(self, read: Callable[[Host], None], step: int) -> None:
        """Have each host read its parts of the state that an earlier run had before `step`."""
        raise NotImplementedError

    def storing(self, saving: Saving | None) -> None:  # noqa: B027 (nothing is lost in one process)
        """While a state is being stored: whoever is lost comes back to it and begins again."""

    def spans(self) -> list[Span]:
        """When the actors worked during the last steps; empty in one process."""
        return []

    @property
    def dashboard(self) -> str:
        """Where Ray's dashboard is; empty where there is none."""
        return ""

    def hear(self, heard: Callable[[str], None]) -> None:  # noqa: B027 (nothing happens there)
        """Have `heard` get a line whenever actors are lost or others go on."""

    def close(self) -> None:  # noqa: B027 (nothing to close is the rule in one process)
        """Give back everything that was started."""

    # -- asking hosts -------------------------------------------------------------------------

    @abstractmethod
    def ask(self, host: int, verb: Callable[..., Any], *words: Any, returns: int = 1) -> Any:
        """Have a host do one of its methods; the answer may be a future that other words take."""

    @abstractmethod
    def get(self, answers: Sequence[Any]) -> list[Any]:
        """The values of answers."""

    def ready(self, answers: Sequence[Any]) -> bool:
        """Whether `get` would not wait."""
        return True

    def guarded(self, action: Callable[[], Answer]) -> Answer:
        """Do something that asks hosts; if some are lost, after their recovery once more."""
        return action()

    def mark(self, done: int) -> None:  # noqa: B027 (nothing is lost in one process)
        """The state after `done` steps is one that no replay goes back behind."""

    @abstractmethod
    def submit(self, name: str, at: HeldOut) -> None:
        """Run the calls of a step (STEP) or of a pass of the probe on a held-out batch."""

    # -- evaluation ---------------------------------------------------------------------------

    def score(self, paths: Mapping[str, Sequence[int]], split: str) -> dict[str, Score]:
        """Score paths on a split."""
        return self._score(paths, [Scoring(split, i) for i in range(self.job.splits[split])])

    def clean_loss(self, path: Sequence[int], step: int) -> float:
        """Cross-entropy of a path on the training batch of `step`, without noise or labels."""
        return self._score({"": path}, [Training(step)])[""].loss

    def _score(
        self, paths: Mapping[str, Sequence[int]], batches: Sequence[Which]
    ) -> dict[str, Score]:
        return self.guarded(partial(self.method.score, self, paths, batches))

    def probe(self, batches: int, draws: int) -> dict[str, float]:
        """Measure on held-out batches (hosts/probe_row.py); leaves the run as it is."""
        return self.guarded(partial(self._probe, batches, draws))

    def _probe(self, batches: int, draws: int) -> dict[str, float]:
        tree, job, hosts = self.tree, self.job, range(len(self.plan.names))
        spine = {str(path[-2]): path for path in tree.spine_paths}
        clean = self.method.score(self, spine, [HeldOut(k) for k in range(batches)])
        for part, name, held in probe_parts(batches, draws, job.rule):
            self.get([self.ask(host, turn, part) for host in hosts])
            for at in held:
                self.submit(name, at)
        numbers = self.get([self.ask(host, turn, "end") for host in hosts])
        return combine(numbers, tree, job.rule, clean, batches, draws, job.places)
