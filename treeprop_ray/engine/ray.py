"""The distributed engine: every tree node (or line of nodes, or chain stage) is a Ray actor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from torch import Tensor, nn

from treeprop_ray.chain import ChainHost
from treeprop_ray.config import Settings, run_name
from treeprop_ray.data import Batches, DataSet
from treeprop_ray.engine import runtime, transport
from treeprop_ray.engine.actors import HostLike, Role
from treeprop_ray.engine.base import Score, Span, State, StepReport
from treeprop_ray.engine.driver import Driver, PlacementBusy
from treeprop_ray.errors import ActorLost, TrainingError
from treeprop_ray.host import Host
from treeprop_ray.network import STEM
from treeprop_ray.optim import OptimizerRule
from treeprop_ray.placement import Plan, plan, stages
from treeprop_ray.rule import Rule
from treeprop_ray.schedule import one_chain_step, one_step
from treeprop_ray.tree import Edge, Tree

REPLANS = 5
Parts = Callable[[Sequence[Edge]], dict[Edge, nn.Module]]


@dataclass(frozen=True)
class Job:
    """A network, its data and its rules, as recipes that an actor carries out for its share."""

    tree: Tree
    rule: Rule
    optimizer: OptimizerRule
    parts: Parts  # makes the modules of some edges
    batches: Callable[[], Batches]  # only the boundary calls this
    stem_trains: bool
    batch: int
    splits: Mapping[str, int]  # evaluation batches of each split


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


def owners(tree: Tree, made: Plan, tree_method: bool) -> dict[Edge, int]:
    """The host of every edge; stem and head live at the boundary (a chain's head at its end)."""
    if not tree_method:
        cuts = stages(tree, len(made.names))
        return {STEM: 0, **{edge: k for k, cut in enumerate(cuts) for edge in cut}}
    at, owner = made.layout.host_of, {STEM: made.layout.boundary, tree.head: made.layout.boundary}
    for node in tree.nodes.values():
        owner[node.left] = at[node.n]
        if not tree.is_spine(node):
            owner[node.right] = at[node.n]
    return owner


def make_host(
    job: Job, settings: Settings, made: Plan, index: int, owner: Mapping[Edge, int]
) -> HostLike:
    """Build an actor's share; runs inside the actor."""
    edges = [edge for edge, host in owner.items() if host == index]
    parts = job.parts(edges)
    batch = job.batches() if index == made.layout.boundary else None
    common = (batch, job.stem_trains, made.device, settings.precision)
    if settings.method != "tree":
        cut = stages(job.tree, len(made.names))[index]
        return ChainHost(job.tree, job.rule, job.optimizer, parts, cut, *common)
    nodes = [n for n, host in made.layout.host_of.items() if host == index]
    return Host(job.tree, job.rule, job.optimizer, parts, nodes, *common)


def describe(tree: Tree, made: Plan, index: int, tree_method: bool) -> str:
    """What an actor is, for the dashboard: level and interval of its nodes."""
    if not tree_method:
        cut = stages(tree, len(made.names))[index]
        return f"blocks {cut[0][0]}..{cut[-1][1]}" if cut else "no block"
    nodes = [tree.nodes[n] for n, host in made.layout.host_of.items() if host == index]
    about = [f"node {n.n} level {n.level} ({n.l}, {n.r})" for n in nodes]
    return "; ".join((["stem, head"] if index == made.layout.boundary else []) + about)


def parts_from_settings(
    settings: Settings, shape: Any, edges: Sequence[Edge]
) -> dict[Edge, nn.Module]:
    """Fresh modules of some edges; each depends on (seed, edge) only."""
    from treeprop_ray.models import blueprint

    plan_ = blueprint(settings, shape)
    return {edge: plan_.build(edge, settings.seed, shape.dtype) for edge in edges}


def batches_from_settings(settings: Settings) -> Batches:
    """Load the data where the boundary lives."""
    from treeprop_ray.data import load

    return Batches(load(settings), settings.batch, settings.seed)


def build(settings: Settings, data: DataSet, total_steps: int) -> RayEngine:
    """Start or join Ray, plan, and make the actors."""
    from treeprop_ray.models import blueprint

    shape = data.shape
    print_ = blueprint(settings, shape)
    tree = Tree(print_.N, settings.split)
    stem = print_.build(STEM, settings.seed)
    job = Job(
        tree=tree,
        rule=Rule.of(settings, print_.family, data.labels_per_sample),
        optimizer=OptimizerRule.of(settings, total_steps),
        parts=partial(parts_from_settings, settings, shape),
        batches=partial(batches_from_settings, settings),
        stem_trains=any(p.requires_grad for p in stem.parameters()),
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


def plan_table(settings: Settings, made: Plan, tree: Tree, parameters: Mapping[Edge, int]) -> str:
    """Node, level, actor, device, parameters: what --cfg shows."""
    tree_method = settings.method == "tree"
    owner = owners(tree, made, tree_method)
    rows = [("node", "level", "actor", "device", "parameters")]

    def row(node: str, level: str, host: int, edges: Sequence[Edge]) -> None:
        device = f"{made.gpus:g} GPU" if made.gpus else f"{made.cpus:g} CPU"
        count = sum(parameters[e] for e in edges if owner[e] == host)
        rows.append((node, level, made.names[host], device, f"{count:,}"))

    if tree_method:
        row("ends", "0", made.layout.boundary, [STEM, tree.head])
        for node in sorted(tree.nodes.values(), key=lambda n: (n.level, n.n)):
            edges = [node.left] if tree.is_spine(node) else [node.left, node.right]
            row(str(node.n), str(node.level), made.layout.host_of[node.n], edges)
    else:
        for k, cut in enumerate(stages(tree, len(made.names))):
            row(f"{cut[0][0]}-{cut[-1][1]}", "-", k, [STEM, *cut] if k == 0 else cut)
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(t.rjust(w) for t, w in zip(r, widths, strict=True)) for r in rows)
