"""The distributed engine: every tree node (or line of nodes, or chain stage) is a Ray actor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from torch import Tensor

from treeprop_ray.config import Settings, run_name
from treeprop_ray.data import DataSet
from treeprop_ray.engine import runtime, transport
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.base import Score, Span, State, StepReport
from treeprop_ray.engine.driver import Driver, PlacementBusy
from treeprop_ray.engine.job import (
    Job,
    batches_from_settings,
    describe,
    make_host,
    owners,
    parts_from_settings,
)
from treeprop_ray.errors import ActorLost, TrainingError
from treeprop_ray.optim import OptimizerRule
from treeprop_ray.placement import Plan, plan
from treeprop_ray.rule import Rule
from treeprop_ray.schedule import one_chain_step, one_step
from treeprop_ray.tree import Edge, Tree

REPLANS = 5


class RayEngine:
    """Runs a job on the actors of a plan, and recovers from lost ones.

    A recovery point is the state of all actors after one common step. When an actor dies, all go
    back to the point and the steps since are replayed; a step is a function of (seed, step) and
    the state, so the run ends with the same weights as if nothing had happened.
    """

    def __init__(self, job: Job, settings: Settings, made: Plan, owns_ray: bool = False) -> None:
        self.job, self.settings, self.tree, self.owns_ray = job, settings, job.tree, owns_ray
        self.point: tuple[int, Any] = (0, None)  # (step, states by actor); None: as built
        self.pending: tuple[int, list[Any]] | None = None  # a point that is under way
        self.journal: dict[int, bool] = {}  # steps submitted since the point -> report
        self.failures = self.replayed = 0
        self._start(made)

    def _start(self, made: Plan) -> None:
        """Make the actors of a plan."""
        job, settings = self.job, self.settings
        tree_method = settings.method == "tree"
        self.plan, self.owner = made, owners(job.tree, made, tree_method)
        pieces = settings.microbatches
        if tree_method:
            calls = one_step(job.tree, job.rule, made.layout, job.stem_trains, pieces)
        else:
            calls = one_chain_step(len(made.names), job.stem_trains, pieces)
        roles = []
        for index, name in enumerate(made.names):
            mine = tuple(c for c in calls if c.host == index)
            roles.append(
                Role(
                    name=name,
                    about=describe(job.tree, made, index, tree_method),
                    make_host=partial(make_host, job, settings, made, index, self.owner),
                    calls=mine,
                    total=job.batch * (job.rule.mc_samples if tree_method else 1),
                    pieces=pieces,
                    clip=job.optimizer.clip > 0,
                    direct=settings.transport != "store",
                    threads=settings.threads,
                    keep_spans=len(mine) * settings.timeline_steps,
                )
            )
        self.driver = Driver(
            made,
            roles,
            calls,
            clip=job.optimizer.clip > 0,
            in_flight=settings.in_flight,
            transport=settings.transport,
            wave_timeout=settings.wave_timeout,
        )

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
            if self.failures > self.settings.max_failures:
                raise TrainingError(
                    f"{error}; that is failure {self.failures}, "
                    f"max_failures={self.settings.max_failures}"
                ) from error
            steps = sorted(self.journal.items())
            print(
                f"lost an actor ({error}); back to step {self.point[0]}, "
                f"replaying {len(steps)} steps",
                file=sys.stderr,
                flush=True,
            )
            self.pending = None
            try:
                self._mend()
                self._restore()
                for step, report in steps:
                    self.driver.step(step, report)
                self.replayed += len(steps)
                return
            except ActorLost as e:
                error = e

    def _mend(self) -> None:
        """The same actors if their places live on; else a new plan for what the cluster has."""
        try:
            self.driver.revive()
            return
        except ActorLost:
            self.driver.close()
        for attempt in range(REPLANS):
            try:
                name = run_name(self.settings)
                self._start(plan(self.settings, self.tree, runtime.cluster(), name))
                return
            except PlacementBusy:  # a machine that has just died may still be counted
                if attempt == REPLANS - 1:
                    raise

    def _restore(self) -> None:
        _, states = self.point
        if states is None:
            self.driver.become(self.driver.roles, self.driver.calls)
            return
        weights = {k: v for w, _ in states for k, v in w.items()}
        optimizer = {k: v for _, o in states for k, v in o.items()}
        self.driver.get([a.load.remote(weights, optimizer) for a in self.driver.actors])

    # -- evaluation: the batch goes through the actors that own the blocks ---------------------

    def score(self, paths: Mapping[str, Sequence[int]], split: str) -> dict[str, Score]:
        batches = [(split, i) for i in range(self.job.splits[split])]
        scores: dict[str, Score] = self._guarded(lambda: self._score(paths, batches))
        return scores

    def clean_loss(self, path: Sequence[int], step: int) -> float:
        scores: dict[str, Score] = self._guarded(lambda: self._score({"": path}, [("step", step)]))
        return scores[""].loss

    def _score(
        self, paths: Mapping[str, Sequence[int]], batches: Sequence[tuple[str, int]]
    ) -> dict[str, Score]:
        head = self.driver.actors[self.owner[self.tree.head]]
        edges = {name: self.tree.path_edges(path)[:-1] for name, path in paths.items()}
        asked: dict[str, list[Any]] = {name: [] for name in paths}
        for split, index in batches:
            z_0, y = self.driver.actors[0].open_split.options(num_returns=2).remote(split, index)
            states: dict[tuple[Edge, ...], Any] = {(): z_0}
            for name, along in edges.items():
                for k in range(1, len(along) + 1):
                    key = tuple(along[:k])
                    if key not in states:
                        actor = self.driver.actors[self.owner[along[k - 1]]]
                        states[key] = actor.through.remote([along[k - 1]], states[key[:-1]])
                asked[name].append(head.score.remote(states[tuple(along)], y))
        out = {}
        for name, refs in asked.items():
            found = self.driver.get(refs)
            labels = sum(n for _, _, n in found)
            out[name] = Score(
                sum(loss for loss, _, _ in found) / labels, sum(r for _, r, _ in found) / labels
            )
        return out

    # -- state ------------------------------------------------------------------------------------

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


def build(settings: Settings, data: DataSet, total_steps: int) -> RayEngine:
    """Start or join Ray, plan, and make the actors."""
    from treeprop_ray.models import blueprint

    shape = data.shape
    print_ = blueprint(settings, shape)
    tree = Tree(print_.N, settings.split)
    job = Job(
        tree=tree,
        rule=Rule.of(settings, print_.family, data.labels_per_sample),
        optimizer=OptimizerRule.of(settings, total_steps),
        parts=partial(parts_from_settings, settings, shape),
        batches=partial(batches_from_settings, settings),
        stem_trains=print_.stem_trains,
        batch=settings.batch,
        splits=data.batch_counts,
    )
    return launch(job, settings)


def launch(job: Job, settings: Settings) -> RayEngine:
    """Start or join Ray and run the job there."""
    owns = runtime.start(settings.ray)
    try:
        made = plan(settings, job.tree, runtime.cluster(), run_name(settings))
        return RayEngine(job, settings, made, owns)
    except BaseException:
        if owns:
            runtime.stop()
        raise
