"""Recovery from lost actors: a common point in memory, and a journal of the steps since.

A recovery point is the state of all actors after one common step, held in the object store of the
driver's machine. When an actor dies, all go back to the point and the steps since are replayed; a
step is a function of (seed, step) and the state, so the run ends with the same weights as if
nothing had happened.

    point 0            pending 50        lost at 57
    |------------------|------.          all states back to point 0 (50 had not arrived yet),
    journal 0 … 56            '- X       actors made anew, steps 0 … 56 submitted again
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from torch import Tensor

from treeprop_ray.config import Settings
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine import runtime, transport
from treeprop_ray.engine.base import Score, Span, State, StepReport
from treeprop_ray.engine.driver import Driver, PlacementBusy
from treeprop_ray.errors import ActorLost, TrainingError, UserError
from treeprop_ray.schedule.placement import Cluster, Plan

REPLANS = 5


class RecoveringEngine(ABC):
    """What engines on Ray share: steps, state and the way back after a loss."""

    driver: Driver

    def __init__(
        self, settings: Settings, tree: Tree, splits: Mapping[str, int], owns_ray: bool
    ) -> None:
        """`splits`: how many evaluation batches each split has."""
        self.settings, self.tree, self.owns_ray = settings, tree, owns_ray
        self.splits = splits
        self.point: tuple[int, Any] = (0, None)  # (step, states by actor); None: as built
        self.pending: tuple[int, list[Any]] | None = None  # a point that is under way
        self.journal: dict[int, bool] = {}  # steps submitted since the point -> report
        self.failures = self.replayed = 0
        self._start(self._plan(settings, runtime.cluster()))

    @abstractmethod
    def _plan(self, settings: Settings, cluster: Cluster) -> Plan:
        """Who lives where; UserError when it cannot fit."""

    @abstractmethod
    def _start(self, made: Plan) -> None:
        """Make the actors of a plan and their driver."""

    @abstractmethod
    def _score(
        self, paths: Mapping[str, Sequence[int]], batches: Sequence[tuple[str, int]]
    ) -> dict[str, Score]:
        """Score paths on some evaluation batches, on the actors."""

    def score(self, paths: Mapping[str, Sequence[int]], split: str) -> dict[str, Score]:
        batches = [(split, i) for i in range(self.splits[split])]
        scores: dict[str, Score] = self._guarded(lambda: self._score(paths, batches))
        return scores

    def clean_loss(self, path: Sequence[int], step: int) -> float:
        scores: dict[str, Score] = self._guarded(lambda: self._score({"": path}, [("step", step)]))
        return scores[""].loss

    # -- steps and state ------------------------------------------------------------------------

    def step(self, step: int, report: bool) -> None:
        self.journal[step] = report
        try:
            self.driver.step(step, report)
            self._advance_point(step + 1)
        except ActorLost as e:
            self._recover(e)

    def reports(self) -> list[StepReport]:
        found: list[StepReport] = self._guarded(lambda: self.driver.wait())
        return found

    def state(self) -> State:
        found: State = self._guarded(lambda: collect_state(self.driver))
        return found

    def load(self, state: State, step: int = 0) -> None:
        packed = [{k: transport.to_array(v) for k, v in part.items()} for part in state]
        self.journal.clear()
        self._set_point(step, [tuple(packed)])
        try:
            self._restore()
        except ActorLost as e:
            self._recover(e)

    def usage(self) -> list[tuple[float, int, Any]]:
        """Per actor: busy seconds and bytes sent since the last question, and its last spans."""

        def ask() -> list[Any]:
            self.driver.wait()
            return self.driver.get([a.usage.remote() for a in self.driver.actors])

        found: list[Any] = self._guarded(ask)
        return found

    def spans(self) -> list[Span]:
        return [span for _, _, spans in self.usage() for span in spans]

    def close(self) -> None:
        self.driver.close()
        if self.owns_ray:
            runtime.stop()

    # -- recovery -------------------------------------------------------------------------------

    def _advance_point(self, done: int) -> None:
        """Ask for a new point now and then; it counts once every actor's state has arrived."""
        if self.pending is not None:
            step, refs = self.pending
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)
            if len(ready) == len(refs):
                self._set_point(step, self.driver.get(refs))
        if self.pending is None and done % self.settings.snapshot_every == 0:
            self.pending = (done, [a.state.remote() for a in self.driver.actors])

    def _set_point(self, step: int, states: Any) -> None:
        self.point, self.pending = (step, states), None
        self.journal = {s: report for s, report in self.journal.items() if s >= step}

    def _guarded(self, action: Callable[[], Any]) -> Any:
        """Do something that asks actors; after a recovery do it again."""
        while True:
            try:
                return action()
            except ActorLost as e:
                self._recover(e)

    def _recover(self, error: ActorLost) -> None:
        """Make lost actors anew, bring all to the point, replay."""
        while True:
            self.failures += 1
            self.pending = None
            lost = self.driver.lost()
            names = ", ".join(self.driver.roles[i].name for i in lost) or "a tensor"
            if self.failures > self.settings.max_failures:
                raise TrainingError(
                    f"lost {names} ({error}); that is failure {self.failures}, "
                    f"max_failures={self.settings.max_failures}"
                ) from error
            steps = sorted(self.journal.items())
            print(
                f"lost {names} ({error}); back to step {self.point[0]}, "
                f"replaying {len(steps)} steps",
                file=sys.stderr,
                flush=True,
            )
            try:
                self._mend(lost)
                self._restore()
                for step, report in steps:
                    self.driver.step(step, report)
                self.replayed += len(steps)
                return
            except ActorLost as e:
                error = e

    def _mend(self, lost: list[int]) -> None:
        """The same actors if their places live on; else a new plan for what the cluster has."""
        try:
            self.driver.revive(lost)
            return
        except ActorLost:
            self.driver.close()
        for _ in range(REPLANS):
            made = self._plan_for_rest(runtime.cluster())
            try:
                self._start(made)
            except PlacementBusy as e:  # a machine that has just died may still be counted
                busy = e
                continue
            print(f"continuing on {len(made.names)} actors", file=sys.stderr, flush=True)
            return
        raise TrainingError(f"no place for the actors on what is left: {busy}") from busy

    def _plan_for_rest(self, cluster: Cluster) -> Plan:
        """The plan that was asked for, or as many packed actors as still fit."""
        try:
            return self._plan(self.settings, cluster)
        except UserError as e:
            error = e
        for hosts in range(len(self.driver.roles), 0, -1):
            fewer = replace(self.settings, placement="packed", hosts=hosts, strategy="PACK")
            try:
                return self._plan(fewer, cluster)
            except UserError:
                continue
        raise TrainingError(f"what is left of the cluster is too little: {error}") from error

    def _restore(self) -> None:
        """Bring all actors to the point."""
        _, states = self.point
        if states is None:
            self.driver.become(self.driver.roles, self.driver.calls)
            return
        weights = {k: v for w, _ in states for k, v in w.items()}
        optimizer = {k: v for _, o in states for k, v in o.items()}
        self.driver.get([a.load.remote(weights, optimizer) for a in self.driver.actors])


def collect_state(driver: Driver) -> State:
    """Weights and optimizer state of all actors after the last step."""
    driver.wait()
    weights: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    for w, o in driver.get([a.state.remote() for a in driver.actors]):
        weights.update({k: _tensor(v) for k, v in w.items()})
        optimizer.update({k: _tensor(v) for k, v in o.items()})
    return dict(sorted(weights.items())), dict(sorted(optimizer.items()))


def _tensor(value: Any) -> Tensor:
    found = transport.from_array(value)
    assert found is not None
    return found
