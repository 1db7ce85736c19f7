"""What a step takes on given devices, by the waves, by pipelines and by data parallelism: seconds,
bytes, and memory of the fullest device. Pure Python.

The waves and the one-forward-one-backward pipeline are walked call by call (pricing.py).
Zero-bubble pipelines and data-parallel backpropagation are formulas.
`speeds` are those of the hosts (or stages) of one copy; empty: all are of speed 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call, Layout, Op
from treeprop_ray.schedule.placement import lines, pack, stages
from treeprop_ray.schedule.pricing import Bytes, Link, Priced, Runtime, price
from treeprop_ray.schedule.tree import one_step
from treeprop_ray.schedule.workload import BACKWARD, TRAIN_BYTES, Part, Workload

Speeds = Sequence[float]


@functools.lru_cache(64)  # the same for every number of pieces
def layout_for(tree: Tree, devices: int, speeds: tuple[float, ...] = ()) -> Layout:
    """The packed layout on so many devices; more than one per line cannot be used."""
    return pack(tree, min(devices, len(lines(tree))), speeds)


def speed_of(speeds: Speeds, host: int) -> float:
    """How fast a host is."""
    return speeds[host] if speeds else 1.0


# -- the tree --------------------------------------------------------------------------------------


def tree_calls(work: Workload, layout: Layout, pieces: int) -> list[Call]:
    """The calls of a step."""
    return one_step(work.tree, work.rule, layout, True, pieces)


def tree_step(
    work: Workload, layout: Layout, pieces: int, link: Link, ray: Runtime, speeds: Speeds = ()
) -> Priced:
    """The waves. A right block goes forward and backward in one op, and so does the head."""
    tree, rule, samples = work.tree, work.rule, work.batch / pieces

    def forwards(op: Op) -> tuple[float, Part]:
        """How many forwards an op is worth, of which part."""
        if op.verb in ("head", "hint"):
            return 1.0 + BACKWARD, work.head
        if op.verb in ("open", "close"):
            return (1.0 if op.verb == "open" else BACKWARD), work.stem
        if op.verb in ("answer", "predict"):
            node = tree.nodes[op.n]
            asked = rule.beta > 0 or rule.right_weight(tree, node) > 0
            return (1.0 + BACKWARD if asked else 0.0), work.part(node.right)
        if op.verb in ("lift", "backward"):
            return (1.0 if op.verb == "lift" else BACKWARD), work.part(tree.nodes[op.n].left)
        return 0.0, work.stem

    def cost(call: Call) -> float:
        seconds = sum(n * part.forward(samples) for n, part in map(forwards, call.ops))
        return rule.mc_samples * seconds / speed_of(speeds, call.host)

    each = work.state * samples * rule.mc_samples
    calls = tree_calls(work, layout, pieces)
    return price(calls, max(layout.hosts) + 1, cost, lambda _: each, link, ray)


def host_parameters(work: Workload, layout: Layout) -> dict[int, float]:
    """Parameters of every host: two blocks of a node, one on the spine; stem and head."""
    tree = work.tree
    held = dict.fromkeys(layout.hosts, 0.0)
    held[layout.boundary] += work.head.parameters + work.stem.parameters
    for node in tree.nodes.values():
        edges = [node.left] if tree.is_spine(node) else [node.left, node.right]
        held[layout.host_of[node.n]] += sum(work.part(edge).parameters for edge in edges)
    return held


def tree_memory(work: Workload, layout: Layout, pieces: int) -> float:
    """The fullest actor: parameters, and graphs of left blocks whose adjoints are still to come."""
    tree = work.tree
    alive = min(pieces, 2 * tree.depth) * work.batch / pieces * work.rule.mc_samples
    held = {host: TRAIN_BYTES * n for host, n in host_parameters(work, layout).items()}
    for node in tree.nodes.values():
        graph = 0.0 if node.is_leaf else alive * work.part(node.left).graph
        held[layout.host_of[node.n]] += graph
    return max(held.values())


# -- pipelines -------------------------------------------------------------------------------------


def stage_parts(work: Workload, count: int, speeds: Speeds = ()) -> list[list[Part]]:
    """The chain's parts, stage by stage."""
    cuts = stages(work.tree, count, speeds)
    parts = [[work.part(edge) for edge in cut] for cut in cuts]
    parts[0].insert(0, work.stem)
    return parts


def stage_parameters(work: Workload, count: int, speeds: Speeds = ()) -> list[float]:
    """Parameters of every stage."""
    return [sum(p.parameters for p in parts) for parts in stage_parts(work, count, speeds)]


def pipeline_step(
    work: Workload, count: int, pieces: int, link: Link, ray: Runtime, speeds: Speeds = ()
) -> Priced:
    """Backpropagation over a chain of `count` stages, one forward one backward."""
    samples = work.batch / pieces
    times = [
        sum(part.forward(samples) for part in parts) / speed_of(speeds, k)
        for k, parts in enumerate(stage_parts(work, count, speeds))
    ]
    passes = {"ahead": 1.0, "back": float(BACKWARD)}  # the head's are among its stage's

    def cost(call: Call) -> float:
        return sum(passes.get(op.verb, 0.0) for op in call.ops) * times[call.host]

    each = work.state * samples
    size: Bytes = lambda name: each if name[0] in "za" else 0.0  # noqa: E731 (labels are small)
    return price(one_chain_step(count, True, pieces), count, cost, size, link, ray)


def zero_bubble_step(
    work: Workload, count: int, pieces: int, link: Link, speeds: Speeds = ()
) -> float:
    """A pipeline whose gradients of weights fill the waits, on paper. With stages of t seconds for
    a piece: 3 m t of work after the first forward has come down, by half stages, (S - 1) t / 2.
    With few pieces the way of the first one down and up counts, and two passes of each of the
    others."""
    samples = work.batch / pieces
    times = [
        sum(part.forward(samples) for part in parts) / speed_of(speeds, k)
        for k, parts in enumerate(stage_parts(work, count, speeds))
    ]
    hop = link.latency + work.state * samples / link.bandwidth if count > 1 else 0.0
    longest, whole = max(times), sum(times)
    full = 3 * pieces * longest + (whole - longest) / 2 + (count - 1) * hop
    few = 2 * whole + 2 * (pieces - 1) * longest + longest + 2 * (count - 1) * hop
    return max(full, few)


def pipeline_memory(work: Workload, count: int, pieces: int, speeds: Speeds = ()) -> float:
    """The fullest stage: its parameters, and the graphs of pieces that are on their way."""
    samples = work.batch / pieces
    held = [
        TRAIN_BYTES * sum(p.parameters for p in parts)
        + min(pieces, count - k) * samples * sum(p.graph for p in parts)
        for k, parts in enumerate(stage_parts(work, count, speeds))
    ]
    return max(held)


# -- data parallelism ------------------------------------------------------------------------------


def chain_parts(work: Workload) -> list[Part]:
    """Stem, blocks and head of the deployed network."""
    edges = work.tree.path_edges(work.tree.chain)
    return [work.stem, *(work.part(edge) for edge in edges)]


def replica_step(
    work: Workload, replicas: int, link: Link, slowest: float = 1.0, pieces: int = 1
) -> float:
    """Data-parallel backpropagation: a share of the batch each, piece by piece, then a ring
    all-reduce. Half of the exchange is taken to hide behind the backward pass."""
    samples, parts = work.batch / replicas / pieces, chain_parts(work)
    passes = (1 + BACKWARD) * pieces
    compute = passes * sum(part.forward(samples) for part in parts) / slowest
    gradients = 4 * sum(part.parameters for part in parts)
    exchange = 2 * (replicas - 1) / replicas * gradients / link.bandwidth
    return compute + 0.5 * exchange + 2 * (replicas - 1) * link.latency


def replica_bytes(work: Workload, replicas: int) -> float:
    """Bytes that all replicas send in a step."""
    return 2 * (replicas - 1) * 4 * sum(part.parameters for part in chain_parts(work))


def replica_memory(work: Workload, replicas: int, pieces: int = 1) -> float:
    """The whole network, and the graphs of a share of the batch."""
    parts = chain_parts(work)
    parameters, graph = sum(p.parameters for p in parts), sum(p.graph for p in parts)
    return TRAIN_BYTES * parameters + work.batch / replicas / pieces * graph
