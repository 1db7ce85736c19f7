"""Which node lives in which actor, and what each actor asks of the cluster. Pure functions.

A node never works at the same time as its descendants on one line, so a node shares its actor
with the line of one child at no cost, and the tensor between them does not travel:

    N = 8, lines    4-6-7 (the spine, with stem and head)    2-1    3    5

That is N / 2 lines for N - 1 nodes; `packed` deals the lines out to H actors.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from treeprop_ray.core.tree import Node, Tree
from treeprop_ray.errors import UserError
from treeprop_ray.schedule.cluster import Cluster, Seat, resources
from treeprop_ray.schedule.ops import Layout

if TYPE_CHECKING:
    from treeprop_ray.config import Settings


@dataclass(frozen=True)
class Plan:
    """Layout of the nodes (or chain stages) over actors, and the resources of each actor."""

    layout: Layout
    names: tuple[str, ...]  # of the actors, by host index
    cpus: float
    gpus: float
    strategy: str = "PACK"
    device: str = "cpu"  # inside each actor; Ray shows an actor only its own GPU
    copies: int = 1  # of all these hosts; those of copy k follow those of copy k - 1
    seats: tuple[Seat, ...] = ()  # of all actors, where devices have several speeds

    @property
    def actors(self) -> list[str]:
        """The names of all copies of all hosts."""
        return [
            f"{name}-copy-{k}" if k else name for k in range(self.copies) for name in self.names
        ]

    @property
    def bundles(self) -> list[dict[str, float]]:
        """One bundle of a placement group for each actor."""
        kinds = [seat.gpu for seat in self.seats] or [True] * len(self.actors)
        gpu = {"GPU": self.gpus} if self.gpus else {}
        return [{"CPU": self.cpus, **(gpu if kind else {})} for kind in kinds]

    @property
    def selectors(self) -> list[dict[str, str]]:
        """The node of each bundle, in Ray's words; empty where Ray may choose."""
        return [{"ray.io/node-id": seat.id} for seat in self.seats if seat.id]

    def seen_by(self, actor: int) -> Plan:
        """The plan as an actor sees it: with the device that it has."""
        if not self.seats or self.device == "cpu":
            return self
        return replace(self, device="cuda" if self.seats[actor].gpu else "cpu")

    def host(self, index: int, turn: int) -> int:
        """A host of the copy whose turn it is: work that any copy can do goes round."""
        return index + turn % self.copies * len(self.names)


def lines(tree: Tree) -> list[list[Node]]:
    """The spine first, then a line for every other node that does not continue its parent's."""
    found = [tree.spine]
    taken = {node.n for node in tree.spine}
    for s in range(1, tree.depth + 1):
        for top in tree.level(s):
            if top.n in taken:
                continue
            line, node = [], top
            while node is not None:
                line.append(node)
                node = tree.left_child(node) or tree.right_child(node)  # type: ignore[assignment]
            taken.update(n.n for n in line)
            found.append(line)
    return found


def pack(tree: Tree, hosts: int, speeds: Sequence[float] = ()) -> Layout:
    """Deal the lines out to `hosts` actors so that the levels' slowest actors are fast.

    A node costs the layers of its two blocks, a spine node those of its left one (the other is the
    head). Longest lines first, to the actor where the sum over levels of the busiest actor grows
    least. Among equals a line joins its parent: a subtree that stays together sends adjoints of its
    top alone. On devices of several `speeds` (actor by actor) a node takes its cost over the speed.
    """
    load = [[0.0] * (tree.depth + 1) for _ in range(hosts)]
    busiest = [0.0] * (tree.depth + 1)  # of all actors, by level
    host_of: dict[int, int] = {}

    def put(line: Sequence[Node], host: int) -> None:
        for node in line:
            load[host][node.level] += cost(node, host)
            host_of[node.n] = host
        busiest[:] = map(max, busiest, load[host])

    def cost(node: Node, host: int) -> float:
        right = 0 if tree.is_spine(node) else tree.layers(node.right)
        return (tree.layers(node.left) + right) / (speeds[host] if speeds else 1.0)

    def span_with(line: Sequence[Node], host: int) -> tuple[float, float]:
        grown = list(load[host])
        for node in line:
            grown[node.level] += cost(node, host)
        return sum(map(max, busiest, grown)), sum(load[host])

    def shape(line: Sequence[Node]) -> tuple[int, int]:
        return -len(line), line[0].level

    first, *rest = lines(tree)
    put(first, 0)
    for _, equal in itertools.groupby(sorted(rest, key=shape), shape):
        left = list(equal)
        while left:
            kin = {host_of.get(tree.parents[line[0].n]): line for line in reversed(left)}
            host = min(range(hosts), key=lambda h: (*span_with(left[0], h), h not in kin))
            line = kin.get(host, left[0])
            left.remove(line)
            put(line, host)
    return Layout(host_of)


def decide(settings: Settings, tree: Tree, cluster: Cluster) -> tuple[str, int]:
    """Resolve `placement=auto` and `hosts=0` to (per_node | packed, actors of one copy)."""
    nodes, lanes = len(tree.nodes), len(lines(tree))
    devices = cluster.devices // settings.replicas  # of each copy
    if settings.placement == "per_node":
        return "per_node", nodes + 1
    if settings.placement == "auto" and settings.hosts == 0 and devices >= nodes + 1:
        return "per_node", nodes + 1
    if settings.hosts > nodes:
        raise UserError(
            f"hosts={settings.hosts}: the tree has only {nodes} nodes (N={tree.N}); replicas= "
            "copies it"
        )
    return "packed", settings.hosts or max(1, min(devices, lanes))


def plan_tree(
    settings: Settings, tree: Tree, cluster: Cluster, run: str, asking: Sequence[int] = ()
) -> Plan:
    """Nodes over actors; raises UserError with the arithmetic when it can never fit. `asking`:
    the spine nodes that ask the head, which copies of it can answer."""
    kind, actors = decide(settings, tree, cluster)
    if kind == "per_node":
        layout = Layout({n: n for n in tree.nodes})
        names = ("boundary", *(f"node-{n}" for n in tree.nodes))
    else:
        seats = seated(settings, cluster, actors)
        hosts = seats[settings.replicas - 1 :: settings.replicas]  # twins are neighbours in speed
        layout = pack(tree, actors, [seat.speed for seat in hosts])
        names = tuple(f"host-{h}" for h in range(actors))
    heads = copies_for(settings.head_copies, asking, len(names))
    names += tuple(f"head-{k + 1}" for k in range(settings.head_copies))
    layout = replace(layout, one_machine=len(cluster.nodes) == 1, heads=heads)
    return fitted(settings, layout, [f"{run}/{name}" for name in names], cluster)


def seated(settings: Settings, cluster: Cluster, hosts: int) -> list[Seat]:
    """The devices of all copies of some hosts, the fastest first; a host's twins follow each other.
    None where all devices are alike, or shared, or where the settings say where actors go."""
    seats, count = cluster.seats, hosts * settings.replicas
    alike = len({seat.speed for seat in seats}) < 2 or len(seats) < count
    chosen = settings.strategy != "PACK" or settings.gpus_per_actor >= 0 or settings.head_copies
    if alike or chosen or (settings.device == "cpu" and cluster.gpus):
        return []
    return seats[:count]


def copies_for(copies: int, asking: Sequence[int], first: int) -> dict[int, int]:
    """Which copy of the head answers which node; hosts from `first` on. The boundary's own head and
    the copies take turns, from the finest level on, whose answer is needed first."""
    if copies == 0:
        return {}
    if copies >= len(asking):
        raise UserError(
            f"head_copies={copies}: the head is asked {len(asking)} times in a step; at most "
            f"{len(asking) - 1} copies (objective=node_all_ce or beta > 0 ask it at every level)"
        )
    turns = enumerate(reversed(asking))
    return {n: first + k % (copies + 1) - 1 for k, n in turns if k % (copies + 1)}


def plan_stages(settings: Settings, tree: Tree, cluster: Cluster, run: str) -> Plan:
    """A chain's blocks over actors, in runs of equal length."""
    actors = min(decide(settings, tree, cluster)[1], tree.N)
    layout = Layout({k: k for k in range(actors)}, one_machine=len(cluster.nodes) == 1)
    return fitted(settings, layout, [f"{run}/stage-{k}" for k in range(actors)], cluster)


def alone(tree: Tree, device: str) -> Plan:
    """Everything in one process."""
    return Plan(Layout.single(tree), ("local",), 0.0, 0.0, device=device)


def fitted(settings: Settings, layout: Layout, names: Sequence[str], cluster: Cluster) -> Plan:
    """A plan with the resources of every actor; UserError when the cluster can never hold it."""
    copies = settings.replicas
    cpus, gpus = resources(settings, len(names) * copies, cluster)
    device = "cuda" if gpus > 0 and settings.device != "cpu" else "cpu"
    seats = seated(settings, cluster, len(names))
    if seats:  # by copy, then by host
        seats = [seats[h * copies + k] for k in range(copies) for h in range(len(names))]
        cpus = settings.cpus_per_actor or seat_cpus(seats, cluster)
        gpus = float(any(seat.gpu for seat in seats))
        device = "cuda" if gpus else "cpu"
    plan = Plan(layout, tuple(names), cpus, gpus, settings.strategy, device, copies, tuple(seats))
    if not seats:
        check_fits(plan, cluster)
    return plan


def seat_cpus(seats: Sequence[Seat], cluster: Cluster) -> float:
    """CPUs of each actor: what every machine has for those that sit there, at most one."""
    taken = collections.Counter(seat.node for seat in seats)
    return min(1.0, *(cluster.nodes[node][0] / count for node, count in taken.items()))


def check_fits(made: Plan, cluster: Cluster) -> None:
    """Raise UserError unless the cluster has room for every actor's bundle."""
    actors = len(made.actors)
    wants = f"{actors} actors x ({made.cpus:g} CPU + {made.gpus:g} GPU)"
    for kind, each, have in (
        ("CPU", made.cpus, [c for c, _ in cluster.nodes]),
        ("GPU", made.gpus, [g for _, g in cluster.nodes]),
    ):
        if each == 0:
            continue
        if each > 1 and each != int(each) and kind == "GPU":
            raise UserError(f"gpus_per_actor={each:g}: above 1 only whole numbers")
        slots = [int(h / each + 1e-6) for h in have]
        if sum(slots) < actors:
            raise UserError(
                f"placement cannot fit: {wants} = {actors * each:g} {kind}s, but the cluster has "
                f"{cluster}, room for {sum(slots)} actors; lower hosts, replicas or "
                f"{kind.lower()}s_per_actor, or use placement=packed"
            )
    count = len(cluster.nodes)
    if made.strategy == "STRICT_SPREAD" and actors > count:
        raise UserError(f"strategy=STRICT_SPREAD: {actors} actors, but only {count} Ray nodes")
    if made.strategy == "STRICT_PACK" and not any(
        c >= actors * made.cpus - 1e-6 and g >= actors * made.gpus - 1e-6 for c, g in cluster.nodes
    ):
        raise UserError(f"strategy=STRICT_PACK: no Ray node has room for {wants}; have {cluster}")


def stages(tree: Tree, count: int, speeds: Sequence[float] = ()) -> list[list[tuple[int, int]]]:
    """The chain's blocks, the head among them, cut into `count` runs: of equal length, or as long
    as the `speeds` of their devices want, at least one block each."""
    blocks = tree.path_edges(tree.chain)
    bounds = [len(blocks) * k // count for k in range(count + 1)]
    if len(set(speeds)) > 1:
        whole, ends = sum(speeds[:count]), itertools.accumulate(speeds[:count])
        wanted = [0, *(round(len(blocks) * end / whole) for end in ends)]
        for k in range(1, count):
            bounds[k] = min(max(wanted[k], bounds[k - 1] + 1), len(blocks) - count + k)
    return [blocks[bounds[k] : bounds[k + 1]] for k in range(count)]
