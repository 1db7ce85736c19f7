"""A cluster of made-up machines on this one, and where Ray puts an experiment's actors on it.

The Ray nodes, the placement group and the decision are real; CPUs and GPUs are numbers that the
nodes are told to have. Actors are not started: each would be bound to its bundle of the group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from treeprop_ray import config
from treeprop_ray.checkup.cluster import plan_for, reserves, tree_of
from treeprop_ray.config import Settings
from treeprop_ray.core.network import STEM
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import load
from treeprop_ray.engine import runtime
from treeprop_ray.engine.job import owners
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.models import blueprint
from treeprop_ray.schedule.placement import Plan, stages
from treeprop_ray.through_time.distributed import describe, windows_of

GROUP_SECONDS = 60


@dataclass(frozen=True)
class Placed:
    """An actor and the machine it would run on."""

    machine: int
    actor: str
    holds: str
    parameters: str
    resources: str


@contextmanager
def machines(count: int, cpus: int, gpus: int) -> Iterator[dict[str, int]]:
    """Start `count` Ray nodes on this machine; gives the number of each by its Ray id."""
    if ray.is_initialized():
        raise UserError("doctor simulate: this process is joined to a Ray cluster already")
    key = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # else Ray takes 127.0.0.1 for a single machine
    before = os.environ.get(key)
    os.environ[key] = "1"
    cluster = Cluster()
    try:
        nodes = [cluster.add_node(num_cpus=cpus, num_gpus=gpus) for _ in range(count)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield {node.node_id: number for number, node in enumerate(nodes, 1)}
    finally:
        ray.shutdown()
        cluster.shutdown()
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def bundles_to_machines(plan: Plan, numbers: Mapping[str, int]) -> list[int]:
    """Reserve the plan's placement group as a run would, and see where its bundles land."""
    group = placement_group(plan.bundles, strategy=plan.strategy)
    try:
        if not group.wait(GROUP_SECONDS):
            raise TrainingError(f"Ray did not place {len(plan.names)} bundles of {plan.bundles[0]}")
        landed = placement_group_table(group)["bundles_to_node_id"]
        return [numbers[landed[k]] for k in range(len(plan.names))]
    finally:
        remove_placement_group(group)


def held(settings: Settings, plan: Plan) -> list[tuple[str, str]]:
    """What each actor holds, and how many parameters that is ("?" if the data set is not here)."""
    if config.recurrent(settings):
        cells = [describe(window) for window in windows_of(settings)]
        return [(text, "?") for text in ["data, readout", *cells]]
    tree = tree_of(settings)
    is_tree = settings.method == "tree"
    owner = owners(tree, plan, is_tree)
    counts = _counts(settings, tree)
    out = []
    for host in range(len(plan.names)):
        if is_tree:
            ns = [str(n) for n, h in plan.layout.host_of.items() if h == host]
            ends = ["stem", "head"] if host == plan.layout.boundary else []
            text = ", ".join([*ends, *([f"node {' '.join(ns)}"] if ns else [])])
        else:
            cut = stages(tree, len(plan.names))[host]
            text = f"blocks {cut[0][0]}..{cut[-1][1]}"
        mine = [edge for edge, h in owner.items() if h == host]
        out.append((text, f"{sum(counts[e] for e in mine):,}" if counts else "?"))
    return out


def _counts(settings: Settings, tree: Tree) -> dict[tuple[int, int], int]:
    """Parameters of every block; empty when the data's shape cannot be had."""
    try:
        network = blueprint(settings, load(settings).shape)
    except UserError:
        return {}
    return {edge: network.count_parameters(edge) for edge in (STEM, *tree.blocks)}


def simulate(settings: Settings, count: int, cpus: int, gpus: int) -> list[Placed]:
    """Where the actors of an experiment land on `count` plan-up machines."""
    with machines(count, cpus, gpus) as numbers:
        plan = plan_for(settings, runtime.cluster())
        landed = bundles_to_machines(plan, numbers)
    rows = zip(landed, plan.names, held(settings, plan), strict=True)
    return [
        Placed(machine, name.rpartition("/")[2], text, parameters, reserves(plan))
        for machine, name, (text, parameters) in rows
    ]


def table(placed: list[Placed], count: int) -> str:
    """The actors by machine, as text; machines that stay empty are named."""
    rows = [("machine", "actor", "holds", "parameters", "reserves")]
    for p in sorted(placed, key=lambda p: p.machine):
        rows.append((str(p.machine), p.actor, p.holds, p.parameters, p.resources))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join(t.ljust(w) for t, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    empty = sorted(set(range(1, count + 1)) - {p.machine for p in placed})
    if empty:
        lines.append(f"idle: machine {', '.join(map(str, empty))} (the plan does not need them)")
    return "\n".join(lines)
