"""Recovery from lost actors: a common point in memory, and a journal of the steps since.

A recovery point is the state of all actors after one common step (points.py). When an actor dies,
all go back to the point and the steps since are replayed; a step is a function of (seed, step) and
the state, so the run ends with the same weights as if nothing had happened.

    point 0            pending 50        lost at 57
    |------------------|------.          all states back to point 0 (50 had not arrived yet),
    journal 0 … 56            '- X       actors made anew, steps 0 … 56 submitted again

Copies of a host (replicas=) have the same state, and each actor keeps its own of the last steps
(versions.py): a lost one takes its twin's, and the steps in flight are all that is done again. A
point that is under way counts as soon as one copy of every host has told its state.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from treeprop_ray.config import Settings
from treeprop_ray.engine import network, runtime
from treeprop_ray.engine.base import Saving
from treeprop_ray.engine.crew import ActorLate, PlacementBusy
from treeprop_ray.engine.points import Point
from treeprop_ray.engine.versions import Reach, begun
from treeprop_ray.errors import ActorLost, TrainingError, UserError
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.placement import Plan

if TYPE_CHECKING:
    from treeprop_ray.engine.ray import RayEngine

REPLANS = 5
ATTEMPTS = 20  # of one recovery, while actors are lost again on the way
Answer = TypeVar("Answer")


class Recovery:
    """The way back after a loss, for one engine."""

    def __init__(self, engine: RayEngine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.point: tuple[int, Point | None] = (0, None)  # (step, states); None: as built
        self.pending: deque[tuple[int, Point]] = deque()  # points that are under way
        self.journal: dict[int, bool] = {}  # steps submitted since the point -> report
        self.saving: Saving | None = None  # a state that is being stored; the point stays before it
        self.failures = 0
        self.replays: list[int] = []  # steps done again, for each recovery
        self.heard: Callable[[str], None] = lambda text: None
        self.machines = len(runtime.cluster().nodes) if settings.elastic else 0

    @property
    def replayed(self) -> int:
        """Steps done again, of all recoveries."""
        return sum(self.replays)

    def first(self, start: Callable[[], None]) -> None:
        """Make the first actors; those that die meanwhile are made again."""
        while True:
            try:
                return start()
            except ActorLost as e:
                self.failures += 1
                if self.failures > self.settings.max_failures:
                    raise
                self.say(f"lost {e}; starting again")

    def say(self, text: str) -> None:
        """One line on standard error, and to whoever listens."""
        print(text, file=sys.stderr, flush=True)
        self.heard(text)

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
        arrived = None
        while self.pending and self._may_be_point(self.pending[0][0]):
            step, point = self.pending[0]
            if not point.arrived():
                break
            self.engine.driver.get([*point.names, *point.kept])  # tells if one was lost
            self.pending.popleft()
            self.set_point(step, point)
            arrived = step
        if arrived is not None:
            self._grow()
        # each holds a state of everybody: one is enough while none may count
        most = self.settings.in_flight if self._may_be_point(done) else 0
        if done % self.settings.snapshot_every == 0 and len(self.pending) <= most:
            self._ask_for_point(done)

    def _may_be_point(self, step: int) -> bool:
        """All must be able to go back to a state that is being stored."""
        return self.saving is None or step <= self.saving.step

    def _ask_for_point(self, done: int) -> Point:
        point = self.engine.driver.snapshot(done, self.point[0])
        self.pending.append((done, point))
        return point

    def mark(self, done: int) -> None:
        """Make the state after `done` steps the point; waits for it."""
        if self.saving:
            self.saving.arrived(wait=True)
        point = self._ask_for_point(done)
        self.engine.driver.get([*point.names, *point.kept])
        self.pending.clear()
        self.set_point(done, point)

    def set_point(self, step: int, point: Point) -> None:
        """From now on all go back to this state, of the time before `step`."""
        self.point = (step, point)
        self.journal = {s: report for s, report in self.journal.items() if s >= step}

    def start_from(self, point: Point, step: int) -> None:
        """Take up a state that an earlier run had before `step`."""
        self.journal.clear()
        self.pending.clear()
        self.set_point(step, point)
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
            lost = driver.lost()
            told = driver.told(lost)
            self._take_newest(lost, told)
            names = ", ".join(driver.roles[i].name for i in lost) or "a tensor"
            if self.failures > self.settings.max_failures or attempt == ATTEMPTS:
                again = f", {attempt} times in a row" if attempt == ATTEMPTS else ""
                raise TrainingError(
                    f"lost {names}{again} ({error}); that is failure {self.failures}, "
                    f"max_failures={self.settings.max_failures}"
                ) from error
            steps = sorted(self.journal.items())
            # a step that nobody who lives has begun is not done again, but for the first time
            repeated = sum(step in begun(told) for step, _ in steps) if told else len(steps)
            self.say(
                f"lost {names} ({error}); back to step {self.point[0]}, replaying {repeated} steps"
            )
            try:
                self._avoid_cut_off(error, lost)
                self._mend(lost)
                self._restore()
                for step, report in steps:
                    self.engine.driver.step(step, report)
                    self._store_again(step + 1)
                self.engine.driver.wait()
                self.replays.append(repeated)
                return
            except ActorLost as e:
                error = e

    def _take_newest(self, lost: Sequence[int], told: Mapping[int, Reach]) -> None:
        """What those who live can bring back becomes the point, or the newest one under way that is
        there without those who were lost; who lives has answered behind it."""
        for step, point in reversed(self.pending):
            rest = point.without(lost, len(self.engine.plan.names))
            if rest and self._may_be_point(step):
                self.set_point(step, rest)
                break
        self.pending.clear()
        newest = self.engine.driver.recall(told, self.saving.step if self.saving else None)
        if newest and newest[0] > self.point[0]:
            self.set_point(*newest)

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
            self.say(f"machines {told} cannot reach each other; going on without {left}")
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
            self.say(f"continuing on {len(plan.actors)} actors")
            return
        raise TrainingError(f"no place for the actors on what is left: {busy}") from busy

    def _plan_for_rest(self, cluster: Cluster, actors: int) -> Plan:
        """The plan that was asked for, or as many packed actors as still fit."""
        method, tree = self.engine.method, self.engine.tree
        try:
            return method.plan(self.settings, tree, cluster)
        except UserError as e:
            error = e
        fewer = replace(self.settings, placement="packed", strategy="PACK")
        for count in range(actors, 0, -1):
            for settings in recut(fewer):
                if count % settings.replicas == 0:
                    try:
                        hosts = count // settings.replicas
                        return method.plan(replace(settings, hosts=hosts), tree, cluster)
                    except UserError:
                        continue
        raise TrainingError(f"what is left of the cluster is too little: {error}") from error

    def _grow(self) -> None:
        """elastic=true: go on with more actors where machines have joined; right after a point."""
        if not self.settings.elastic:
            return
        plan, cluster = self.engine.plan, runtime.cluster(self.engine.avoid)
        if len(cluster.nodes) == self.machines:
            return
        self.machines = len(cluster.nodes)
        for settings in recut(self.settings):
            try:
                larger = self.engine.method.plan(settings, self.engine.tree, cluster)
            except UserError:
                continue
            if len(larger.actors) > len(plan.actors):
                break
        else:
            return
        self.say(f"continuing on {len(larger.actors)} actors")
        self.engine.driver.close()
        self.pending.clear()
        self.engine.start(larger)
        self._restore()
        for step, report in sorted(self.journal.items()):
            self.engine.driver.step(step, report)
            self._store_again(step + 1)

    def _restore(self) -> None:
        """Bring all actors to the point."""
        driver, (step, point) = self.engine.driver, self.point
        if point is None:
            driver.become(driver.roles, driver.calls)
        else:
            driver.restore(point, step)
        self._store_again(step)

    def _store_again(self, done: int) -> None:
        """If the state after `done` steps was being stored when an actor was lost."""
        if self.saving and self.saving.step == done:
            self.engine.driver.hold(done)
            self.saving.begin()


def recut(settings: Settings) -> list[Settings]:
    """The same pieces of a batch in the hands of more or fewer copies, most copies first."""
    pieces = settings.replicas * settings.microbatches
    counts = [r for r in range(pieces, 0, -1) if pieces % r == 0]
    if settings.reduce == "fast" or not settings.elastic:
        counts = [r for r in counts if r <= settings.replicas]
    return [
        replace(
            settings,
            replicas=r,
            microbatches=pieces // r,
            shard_optimizer=settings.shard_optimizer and r > 1,
        )
        for r in counts
    ]
