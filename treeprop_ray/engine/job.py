"""A job as recipes: what an actor builds for its share of a network, and who owns which block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from treeprop_ray.config import Settings
from treeprop_ray.core.network import STEM
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.data import Batches
from treeprop_ray.engine.actors import HostLike
from treeprop_ray.hosts.cff import CffHost
from treeprop_ray.hosts.chain import ChainHost
from treeprop_ray.hosts.tree import Host
from treeprop_ray.schedule.cff import one_cff_step
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import Plan, stages
from treeprop_ray.schedule.tree import one_step

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
    samples: int  # in the train split
    splits: Mapping[str, int]  # evaluation batches of each split


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
        if settings.method == "cff":
            tail = (batch, settings.cff, made.device, settings.precision)
            return CffHost(job.tree, job.rule, job.optimizer, parts, cut, *tail)
        return ChainHost(job.tree, job.rule, job.optimizer, parts, cut, *common)
    nodes = [n for n, host in made.layout.host_of.items() if host == index]
    return Host(job.tree, job.rule, job.optimizer, parts, nodes, *common)


def calls_of(job: Job, settings: Settings, made: Plan) -> list[Call]:
    """The calls of one step on the actors of a plan."""
    if settings.method == "tree":
        return one_step(job.tree, job.rule, made.layout, job.stem_trains, settings.microbatches)
    if settings.method == "cff":
        return one_cff_step(stages(job.tree, len(made.names)))
    return one_chain_step(len(made.names), job.stem_trains, settings.microbatches)


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

    return blueprint(settings, shape).build_all(edges, settings.seed, shape.dtype)


def batches_from_settings(settings: Settings) -> Batches:
    """Load the data where the boundary lives."""
    from treeprop_ray.data import load

    return Batches(load(settings), settings.batch, settings.seed)


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
