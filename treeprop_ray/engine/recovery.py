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
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from treeprop_ray.config import Settings
from treeprop_ray.engine import network, runtime, transport
from treeprop_ray.engine.driver import ActorLate, PlacementBusy
from treeprop_ray.errors import ActorLost, TrainingError, UserError
from treeprop_ray.hosts.base import State
from treeprop_ray.schedule.placement import Cluster, Plan

if TYPE_CHECKING:
    from treeprop_ray.engine.ray import RayEngine

REPLANS = 5
ATTEMPTS = 20  # of one recovery, while actors are lost again on the way
Answer = TypeVar("Answer")


class Recovery:
    """The way back after a loss, for one engine."""

    def __init__(self, engine: RayEngine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.point: tuple[int, Any] = (0, None)  # (step, states by actor); None: as built
        self.pending: tuple[int, list[Any]] | None = None  # a point that is under way
        self.journal: dict[int, bool] = {}  # steps submitted since the point -> report
        self.failures = self.replayed = 0

    def first(self, start: Callable[[], None]) -> None:
        """Make the first actors; those that die meanwhile are made again."""
        while True:
            try:
                return start()
            except ActorLost as e:
                self.failures += 1
                if self.failures > self.settings.max_failures:
                    raise
                print(f"lost {e}; starting again", file=sys.stderr, flush=True)

    def step(self, step: int, report: bool) -> None:
        """Submit a step; now and then ask for a new point."""
        self.journal[step] = report
        try:
            self.engine.driver.step(step, report)
            self._advance(step + 1)
        except ActorLost as e:
            self._recover(e)

    def guarded(self, action: Callable[[], Answer]) -> Answer:
        """Do something that asks actors; after a recovery do it again."""
        while True:
            try:
                return action()
            except ActorLost as e:
                self._recover(e)

    def _advance(self, done: int) -> None:
        """Ask for a new point now and then; it counts once every actor's state has arrived."""
        driver = self.engine.driver
        if self.pending is not None:
            step, refs = self.pending
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)
            if len(ready) == len(refs):
                self.set_point(step, driver.get(refs))
        if self.pending is None and done % self.settings.snapshot_every == 0:
            self.pending = (done, driver.states())

    def mark(self, done: int) -> None:
        """Make the state after `done` steps the point; waits for it."""
        self.pending = None
        self.set_point(done, self.engine.driver.get(self.engine.driver.states()))

    def set_point(self, step: int, states: Any) -> None:
        """From now on all go back to this state, of the time before `step`."""
        self.point, self.pending = (step, states), None
        self.journal = {s: report for s, report in self.journal.items() if s >= step}

    def start_from(self, state: State, step: int) -> None:
        """Take up a state that an earlier run had before `step`."""
        self.journal.clear()
        self.set_point(step, [transport.leaving(state)])
        try:
            self._restore()
        except ActorLost as e:
            self._recover(e)

    def _recover(self, error: ActorLost) -> None:
        """Make lost actors anew, bring all to the point, replay. What is lost on the way belongs to
        the same episode, which counts once and is over when the steps are done again."""
        self.failures += 1
        for attempt in range(ATTEMPTS + 1):
            driver = self.engine.driver
            self.pending = None
            lost = driver.lost()
            names = ", ".join(driver.roles[i].name for i in lost) or "a tensor"
            if self.failures > self.settings.max_failures or attempt == ATTEMPTS:
                again = f", {attempt} times in a row" if attempt == ATTEMPTS else ""
                raise TrainingError(
                    f"lost {names}{again} ({error}); that is failure {self.failures}, "
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
                self._avoid_cut_off(error, lost)
                self._mend(lost)
                self._restore()
                for step, report in steps:
                    self.engine.driver.step(step, report)
                self.engine.driver.wait()
                self.replayed += len(steps)
                return
            except ActorLost as e:
                error = e

    def _avoid_cut_off(self, error: ActorLost, lost: list[int]) -> None:
        """Where nobody died and yet no answer came, machines may be cut off from each other."""
        if lost and not isinstance(error, ActorLate):
            return
        machines = [m for m in runtime.machines() if m not in self.engine.avoid]
        if len(machines) < 2:
            return
        pairs = network.cut_pairs(machines)
        if avoid := network.to_avoid(pairs, machines[0]):
            told = "; ".join(" and ".join(m[:8] for m in sorted(pair)) for pair in pairs)
            left = ", ".join(m[:8] for m in sorted(avoid))
            print(f"machines {told} cannot reach each other; going on without {left}",
                  file=sys.stderr, flush=True)  # fmt: skip
            self.engine.avoid |= avoid
            self.engine.driver.close()  # so that new places are found

    def _mend(self, lost: list[int]) -> None:
        """The same actors if their places live on; else a new plan for what the cluster has."""
        driver = self.engine.driver
        try:
            driver.revive(lost)
            return
        except ActorLost:
            driver.close()
        for _ in range(REPLANS):
            rest = runtime.cluster(self.engine.avoid)
            plan = self._plan_for_rest(rest, len(driver.roles))
            try:
                self.engine.start(plan)
            except PlacementBusy as e:  # a machine that has just died may still be counted
                busy = e
                continue
            print(f"continuing on {len(plan.names)} actors", file=sys.stderr, flush=True)
            return
        raise TrainingError(f"no place for the actors on what is left: {busy}") from busy

    def _plan_for_rest(self, cluster: Cluster, actors: int) -> Plan:
        """The plan that was asked for, or as many packed actors as still fit."""
        method, tree = self.engine.method, self.engine.tree
        try:
            return method.plan(self.settings, tree, cluster)
        except UserError as e:
            error = e
        for hosts in range(actors, 0, -1):
            fewer = replace(self.settings, placement="packed", hosts=hosts, strategy="PACK")
            try:
                return method.plan(fewer, tree, cluster)
            except UserError:
                continue
        raise TrainingError(f"what is left of the cluster is too little: {error}") from error

    def _restore(self) -> None:
        """Bring all actors to the point."""
        driver, (_, states) = self.engine.driver, self.point
        if states is None:
            driver.become(driver.roles, driver.calls)
            return
        weights = {k: v for w, _ in states for k, v in w.items()}
        optimizer = {k: v for _, o in states for k, v in o.items()}
        driver.get([actor.load.remote(weights, optimizer) for actor in driver.actors])
