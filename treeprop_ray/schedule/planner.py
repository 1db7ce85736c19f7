"""Which way to train is fastest on some devices: trees, pipelines, data parallelism. Pure Python.

A candidate is a way (tree x replicas, 1F1B and zero-bubble pipelines x replicas, data parallelism)
with its hosts, copies and micro-batches, and what a step of it would take (steps.py). Devices may
be of several speeds: the fastest ones are used, a host and its twins in other copies get neighbours
in the order of speed, and lines of nodes are dealt out by speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.ops import Layout
from treeprop_ray.schedule.placement import lines
from treeprop_ray.schedule.pricing import (
    ETHERNET,
    FREE,
    PCIE,
    RUNTIMES,
    SHARED,
    Link,
    Priced,
    Runtime,
    exchanged,
)
from treeprop_ray.schedule.steps import (
    host_parameters,
    layout_for,
    pipeline_memory,
    pipeline_step,
    replica_bytes,
    replica_memory,
    replica_step,
    stage_parameters,
    tree_memory,
    tree_step,
    zero_bubble_step,
)
from treeprop_ray.schedule.workload import Workload

TREE, ONE_F_ONE_B, ZERO_BUBBLE, DATA = "tree", "1F1B", "zero bubble", "data parallel"
WAYS = (TREE, ONE_F_ONE_B, ZERO_BUBBLE, DATA)
PIECES = {TREE: (1, 2, 4, 8), ONE_F_ONE_B: (1, 2, 4, 8, 16, 32, 64)}
PIECES[ZERO_BUBBLE] = PIECES[DATA] = PIECES[ONE_F_ONE_B]
COPIES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Fleet:
    """The devices, fastest first, what joins them, and what Ray adds for the waves."""

    speeds: tuple[float, ...]
    link: Link
    ray: Runtime = FREE
    memory: float = float("inf")  # bytes of a device

    @classmethod
    def of(cls, speeds: Sequence[float], link: Link, ray: Runtime, memory: float) -> Fleet:
        """Devices in any order."""
        return cls(tuple(sorted(speeds, reverse=True)), link, ray, memory)

    @classmethod
    def on(cls, cluster: Cluster, transport: str = "store", memory: float = 0.0) -> Fleet:
        """The devices of a cluster; what joins them is assumed. `memory` 0: 80 GB of a GPU."""
        seats = [seat for seat in cluster.seats if seat.speed > 0]
        one = len({seat.node for seat in seats}) == 1
        link = ETHERNET if not one else PCIE if cluster.gpus else SHARED
        limit = memory or (80e9 if cluster.gpus else float("inf"))
        return cls.of([seat.speed for seat in seats], link, RUNTIMES[transport], limit)

    def __len__(self) -> int:
        return len(self.speeds)

    def hosts(self, hosts: int, copies: int) -> tuple[float, ...]:
        """The speeds of the hosts of every copy: each counts as its slowest twin; empty where all
        are alike."""
        if len(set(self.speeds)) <= 1 and self.speeds[0] == 1:
            return ()
        return tuple(self.speeds[(h + 1) * copies - 1] for h in range(hosts))

    def fastest(self, count: int) -> Fleet:
        """Some of the devices."""
        return replace(self, speeds=self.speeds[:count])


@dataclass(frozen=True)
class Candidate:
    """A way to take a step, and what it would take."""

    way: str
    hosts: int  # devices of one copy
    copies: int
    pieces: int  # micro-batches of a copy
    step: Priced
    memory: float  # bytes of the fullest device
    layout: Layout | None = None
    per_node: bool = False

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def devices(self) -> int:
        return self.hosts * self.copies

    def __str__(self) -> str:
        if self.way == DATA:
            pieces = f" x {many(self.pieces, 'micro-batch')}" if self.pieces > 1 else ""
            return many(self.copies, "replica") + pieces
        each = "stage" if self.way != TREE else "actor" if self.per_node else "host"
        copies = f" x {self.copies} copies" if self.copies > 1 else ""
        return f"{many(self.hosts, each)}{copies} x {many(self.pieces, 'micro-batch')}"


def many(count: int, what: str) -> str:
    """A number of things."""
    plural = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count} {what}{plural}"


def formula(seconds: float, moved: float) -> Priced:
    """A step that is no walk over calls."""
    return Priced(seconds, seconds, 0.0, 0, moved, 0.0)


def tree(
    work: Workload, fleet: Fleet, copies: int = 1, pieces: int = 1, hosts: int = 0
) -> Candidate:
    """Trees times replicas, packed; `hosts` 0: as many as have a line."""
    count = min(hosts or len(fleet) // copies, len(lines(work.tree)))
    speeds = fleet.hosts(count, copies)
    return _tree(work, fleet, copies, pieces, layout_for(work.tree, count, speeds), speeds)


def per_node(work: Workload, fleet: Fleet, copies: int = 1, pieces: int = 1) -> Candidate:
    """The same with an actor for every node, and one for stem and head."""
    nodes = list(work.tree.nodes)
    order = fleet.hosts(len(nodes) + 1, copies)
    made = _tree(work, fleet, copies, pieces, Layout({n: n for n in nodes}), order)
    return replace(made, per_node=True)


def _tree(
    work: Workload,
    fleet: Fleet,
    copies: int,
    pieces: int,
    layout: Layout,
    speeds: tuple[float, ...],
) -> Candidate:
    share, hosts = work.shared(copies), len(layout.hosts)
    step = tree_step(share, layout, pieces, fleet.link, fleet.ray, speeds)
    sums = list(host_parameters(work, layout).values())
    step = exchanged(step, copies, hosts, sums, fleet.link, fleet.ray)
    return Candidate(TREE, hosts, copies, pieces, step, tree_memory(share, layout, pieces), layout)


def pipeline(
    work: Workload, fleet: Fleet, copies: int = 1, pieces: int = 1, way: str = ONE_F_ONE_B
) -> Candidate:
    """Pipelines times replicas; Ray's times do not count for them."""
    count = min(len(fleet) // copies, work.tree.N)
    share, speeds = work.shared(copies), fleet.hosts(count, copies)
    if way == ZERO_BUBBLE:
        seconds = zero_bubble_step(share, count, pieces, fleet.link, speeds)
        step = formula(seconds, 2 * (count - 1) * work.state * share.batch)
    else:
        step = pipeline_step(share, count, pieces, fleet.link, FREE, speeds)
    sums = stage_parameters(work, count, speeds)
    step = exchanged(step, copies, count, sums, fleet.link, FREE)
    memory = pipeline_memory(share, count, pieces, speeds)
    return Candidate(way, count, copies, pieces, step, memory)


def data_parallel(work: Workload, fleet: Fleet, pieces: int = 1) -> Candidate:
    """A replica of the chain on every device, at most one for each sample."""
    replicas = min(len(fleet), work.batch)
    seconds = replica_step(work, replicas, fleet.link, fleet.speeds[replicas - 1], pieces)
    step = formula(seconds, replica_bytes(work, replicas))
    return Candidate(DATA, 1, replicas, pieces, step, replica_memory(work, replicas, pieces))


def best(candidates: Sequence[Candidate], memory: float = float("inf")) -> Candidate:
    """The fastest of those that fit, or if none does, the fastest; of equals the first."""
    return min(candidates, key=lambda c: (c.memory > memory, c.seconds))


def options(work: Workload, fleet: Fleet, way: str) -> Iterator[tuple[int, int]]:
    """(copies, micro-batches) that share the devices and leave every piece a sample. A pipeline has
    two stages at least: with one it is data parallelism."""
    stages = 2 if way in (ONE_F_ONE_B, ZERO_BUBBLE) and len(fleet) > 1 else 1
    most = min(len(fleet) // stages, work.batch)
    for copies in [most] if way == DATA else [R for R in COPIES if most >= R]:
        yield from ((copies, m) for m in PIECES[way] if copies * m <= work.batch)


def prefixes(fleet: Fleet) -> list[Fleet]:
    """All devices, and those without the slower ones."""
    speeds = fleet.speeds
    ends = [k for k in range(1, len(speeds)) if speeds[k] < speeds[k - 1]]
    return [fleet, *map(fleet.fastest, ends)]


def candidate(work: Workload, fleet: Fleet, way: str, copies: int, pieces: int) -> Candidate:
    """One candidate of a way."""
    if way == TREE:
        return tree(work, fleet, copies, pieces)
    if way == DATA:
        return data_parallel(work, fleet, pieces)
    return pipeline(work, fleet, copies, pieces, way)


def fastest(work: Workload, fleet: Fleet, ways: Sequence[str] = WAYS) -> dict[str, Candidate]:
    """The best candidate of every way."""
    return {
        way: best(
            [
                candidate(work, some, way, R, m)
                for some in prefixes(fleet)
                for R, m in options(work, some, way)
            ],
            fleet.memory,
        )
        for way in ways
    }


def winner(found: dict[str, Candidate], memory: float) -> str:
    """The way that is fastest; empty if none fits."""
    fits = [c for c in found.values() if c.memory <= memory]
    return best(fits).way if fits else ""


# -- placement=auto --------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    return [k for k in range(1, number + 1) if number % k == 0]


def auto(work: Workload, fleet: Fleet, copies: Sequence[int], pieces: int) -> list[Candidate]:
    """What placement=auto chooses from, best first: `pieces` of a batch in the hands of `copies`
    copies (the sums, and so the weights, are the same), on any number of hosts."""
    made = []
    for R in (R for R in copies if len(fleet) >= R):
        most = min(len(fleet) // R, len(lines(work.tree)))
        counts = sorted({*(2**k for k in range(most.bit_length())), most})
        made += [tree(work, fleet, R, pieces // R, hosts) for hosts in counts]
        if len(fleet) // R > len(work.tree.nodes):
            made.append(per_node(work, fleet, R, pieces // R))
    return sorted(made, key=lambda c: (c.memory > fleet.memory, c.seconds, c.devices))
