"""A cluster of made-up machines on this one, and where Ray puts an experiment's actors on it.

The Ray nodes, the placement group and the decision are real; CPUs and GPUs are numbers that the
nodes are told to have. Actors are not started: each would be bound to its bundle of the group.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from treeprop_ray import methods
from treeprop_ray.checkup.cluster import plan_for, reserves
from treeprop_ray.checkup.settings import DoctorSettings
from treeprop_ray.config import Settings
from treeprop_ray.data import load
from treeprop_ray.engine import runtime
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.methods.auto import decided
from treeprop_ray.reporting.tables import columns
from treeprop_ray.schedule.placement import Plan

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
def machines(
    count: int, cpus: int, gpus: int, speeds: Sequence[float] = ()
) -> Iterator[dict[str, int]]:
    """Start `count` Ray nodes on this machine; gives the number of each by its Ray id. `speeds`
    are labels that say how fast a device of each is."""
    if ray.is_initialized():
        raise UserError("doctor simulate: this process is joined to a Ray cluster already")
    key = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # else Ray takes 127.0.0.1 for a single machine
    before = os.environ.get(key)
    os.environ[key] = "1"
    cluster = Cluster()
    try:
        labels = [{runtime.SPEED: f"{speed:g}"} for speed in speeds] or [{}] * count
        nodes = [cluster.add_node(num_cpus=cpus, num_gpus=gpus, labels=own) for own in labels]
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
    group = placement_group(
        plan.bundles, strategy=plan.strategy, bundle_label_selector=plan.selectors or None
    )
    try:
        if not group.wait(GROUP_SECONDS):
            raise TrainingError(
                f"Ray did not place {len(plan.actors)} bundles of {plan.bundles[0]}"
            )
        landed = placement_group_table(group)["bundles_to_node_id"]
        return [numbers[landed[k]] for k in range(len(plan.actors))]
    finally:
        remove_placement_group(group)


def held(settings: Settings, plan: Plan) -> list[tuple[str, str]]:
    """What each actor holds, and how many parameters that is ("?" if the data set is not here)."""
    method = methods.of(settings)
    tree = method.tree(settings)
    residents = method.residents(settings, plan, tree)
    try:
        count = method.network(settings, load(settings).shape).count_parameters
    except UserError:
        count = None
    out = []
    for host in range(len(plan.names)):
        parts = [part for r in residents if r.host == host for part in r.parts]
        parameters = f"{sum(map(count, parts)):,}" if count else "?"
        out.append((brief(method.about(settings, plan, tree, host)), parameters))
    return out


def brief(about: str) -> str:
    """Of an actor's nodes the numbers are enough."""
    nodes = re.findall(r"node (\d+) level", about)
    rest = [text for text in about.split("; ") if not text.startswith("node ")]
    return ", ".join([*rest, f"node {' '.join(nodes)}"] if nodes else rest)


def simulate(
    settings: Settings, count: int, cpus: int, gpus: int, speeds: Sequence[float] = ()
) -> tuple[list[Placed], tuple[str, ...]]:
    """Where the actors of an experiment land on `count` made-up machines, and why these."""
    if speeds and len(speeds) != count:
        raise UserError(f"speeds={list(speeds)}: one for each of nodes={count} machines")
    with machines(count, cpus, gpus, speeds) as numbers:
        cluster = runtime.cluster()
        choice = decided(settings, cluster)
        settings = choice.settings
        plan = plan_for(settings, cluster)
        landed = bundles_to_machines(plan, numbers)
    rows = zip(landed, plan.actors, held(settings, plan) * plan.copies, plan.bundles, strict=True)
    placed = [
        Placed(machine, name.rpartition("/")[2], text, parameters, reserves(bundle))
        for machine, name, (text, parameters), bundle in rows
    ]
    return placed, choice.why


def table(placed: list[Placed], count: int) -> str:
    """The actors by machine, as text; machines that stay empty are named."""
    rows = [("machine", "actor", "holds", "parameters", "reserves")]
    for p in sorted(placed, key=lambda p: p.machine):
        rows.append((str(p.machine), p.actor, p.holds, p.parameters, p.resources))
    lines = [columns(rows, str.ljust)]
    empty = sorted(set(range(1, count + 1)) - {p.machine for p in placed})
    if empty:
        lines.append(f"idle: machine {', '.join(map(str, empty))} (the plan does not need them)")
    return "\n".join(lines)


def report(s: DoctorSettings) -> str:
    """What `doctor simulate` prints: text, or JSON."""
    placed, why = simulate(s, s.nodes, s.cpus, s.gpus, s.speeds)
    if s.json:
        return json.dumps([asdict(p) for p in placed], indent=2)
    where = f"{s.nodes} made-up machines with {s.cpus} CPU + {s.gpus} GPU each"
    lines = [f"experiment={s.experiment} on {where}", *why, table(placed, s.nodes)]
    return "\n".join(lines)
