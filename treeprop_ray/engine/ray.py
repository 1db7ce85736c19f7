"""The distributed engine: every tree node (or line of nodes, or chain stage) is a Ray actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from treeprop_ray.config import Settings, run_name
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.data import DataSet
from treeprop_ray.engine import runtime
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.base import Score
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.job import (
    Job,
    batches_from_settings,
    calls_of,
    describe,
    make_host,
    owners,
    parts_from_settings,
)
from treeprop_ray.engine.recovery import RecoveringEngine
from treeprop_ray.hosts.probe import probe_parts
from treeprop_ray.hosts.probe_row import combine
from treeprop_ray.schedule.placement import Cluster, Plan, plan
from treeprop_ray.schedule.probe import probe_calls


class RayEngine(RecoveringEngine):
    """Runs a job on the actors of a plan, and recovers from lost ones."""

    def __init__(self, job: Job, settings: Settings, owns_ray: bool = False) -> None:
        self.job = job
        super().__init__(settings, job.tree, job.splits, owns_ray)

    def _plan(self, settings: Settings, cluster: Cluster) -> Plan:
        return plan(settings, self.tree, cluster, run_name(self.settings))

    def _start(self, made: Plan) -> None:
        """Make the actors of a plan."""
        job, settings = self.job, self.settings
        tree_method = settings.method == "tree"
        self.plan, self.owner = made, owners(job.tree, made, tree_method)
        pieces, calls = settings.microbatches, calls_of(job, settings, made)
        probes = probe_calls(job.tree, made.layout, job.stem_trains, pieces) if tree_method else {}
        roles = []
        for index, name in enumerate(made.names):
            mine = tuple(c for c in calls if c.host == index)
            more = tuple(c for extra in probes.values() for c in extra if c.host == index)
            roles.append(
                Role(
                    name=name,
                    about=describe(job.tree, made, index, tree_method),
                    make_host=partial(make_host, job, settings, made, index, self.owner),
                    calls=mine + more,
                    total=job.batch * (job.rule.mc_samples if tree_method else 1),
                    pieces=pieces,
                    direct=settings.transport != "store",
                    threads=settings.threads,
                    keep_spans=(len(mine) + 2) * settings.timeline_steps,
                )
            )
        self.driver = Driver(
            made,
            roles,
            calls,
            clip=job.optimizer.clips_globally,
            in_flight=settings.in_flight,
            transport=settings.transport,
            wave_timeout=settings.wave_timeout,
            probes=probes,
        )

    # -- evaluation: the batch goes through the actors that own the blocks ---------------------

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

    # -- the probe: held-out batches through the same actors; only numbers come back ------------

    def probe(self, batches: int, draws: int) -> dict[str, float]:
        """Measure on held-out batches (probe_row.py: the columns); leaves the run as it is."""
        found: dict[str, float] = self._guarded(lambda: self._probe(batches, draws))
        return found

    def _probe(self, batches: int, draws: int) -> dict[str, float]:
        driver, job = self.driver, self.job
        spine = {str(p[-2]): p for p in self.tree.spine_paths}
        clean = self._score(spine, [("step", -1 - k) for k in range(batches)])
        bound = {"tree": driver.bound, **driver.bound_probes}
        for part, which, steps in probe_parts(batches, draws, job.rule):
            driver.get([a.ask.remote("probe", part) for a in driver.actors])
            for step in steps:
                driver.submit(bound[which], step)
                driver.get([a.settled.remote() for a in driver.actors])
        hosts = driver.get([a.ask.remote("probe", "end") for a in driver.actors])
        places = job.batch * job.rule.mc_samples
        return combine(hosts, self.tree, job.rule, clean, batches, draws, places)


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
        samples=len(data.train),
        splits=data.batch_counts,
    )
    return launch(job, settings)


def launch(job: Job, settings: Settings) -> RayEngine:
    """Start or join Ray and run the job there."""
    owns = runtime.start(settings.ray)
    try:
        if settings.method == "cff":
            from treeprop_ray.baselines.cff_ray import CffRayEngine

            return CffRayEngine(job, settings, owns)
        return RayEngine(job, settings, owns)
    except BaseException:
        if owns:
            runtime.stop()
        raise
