"""What a step costs on devices that are not here: the real schedule, with a price on every call.

`price` walks the calls of a step (schedule.py) in the order in which the driver submits them. A
call starts when the driver has submitted it, its actor is free and its inputs have arrived. It
takes the time of its ops; what it makes leaves over its actor's link, one packet after the other.
The longest path through all this is the step. Data-parallel backpropagation is a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treeprop_ray.core.grouping import Grouping
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call, Layout, Op
from treeprop_ray.schedule.placement import lines, pack, stages
from treeprop_ray.schedule.tree import one_step

STATE_BYTES = 4  # of a number in a state: float32, also when the blocks compute in bf16
TRAIN_BYTES = 16  # of a parameter: weight, gradient, two moments of Adam, float32
GRAPH_BYTES = 34  # per token and width that a block keeps for its backward (bf16, flash)


@dataclass(frozen=True)
class Link:
    """Between two devices."""

    name: str
    bandwidth: float  # bytes per second that arrive
    latency: float  # seconds


@dataclass(frozen=True)
class Runtime:
    """What Ray adds."""

    hop: float = 0.0  # seconds from the end of a call to the start of one that waits for it
    submit: float = 0.0  # seconds of the driver per call


@dataclass(frozen=True)
class Network:
    """A chain of N equal Transformer layers, the last with a language-model head, and a batch.

    `grouping` says how many layers the tree's blocks have; one each without it.
    """

    N: int
    width: int = 1280
    vocabulary: int = 50257
    tokens: int = 1024  # of a sequence
    batch: int = 64  # sequences
    grouping: Grouping | None = None

    @property
    def tree(self) -> Tree:
        """The tree over its blocks."""
        return Tree(self.grouping.N if self.grouping else self.N, grouping=self.grouping)

    @property
    def block_parameters(self) -> float:
        return 12 * self.width**2 + 13 * self.width

    @property
    def head_parameters(self) -> float:
        """One more set of block weights, and the embeddings, which stem and head share."""
        return self.block_parameters + (self.vocabulary + self.tokens) * self.width

    def block_flops(self, sequences: float) -> float:
        """Forward of one block: matrices, and causal attention."""
        tokens = sequences * self.tokens
        return tokens * (24 * self.width**2 + 2 * self.tokens * self.width)

    def head_flops(self, sequences: float) -> float:
        """Forward of the last block with the language-model head."""
        matrix = 2 * sequences * self.tokens * self.vocabulary * self.width
        return self.block_flops(sequences) + matrix

    def state_bytes(self, sequences: float) -> float:
        """One state or adjoint."""
        return STATE_BYTES * sequences * self.tokens * self.width

    def graph_bytes(self, sequences: float) -> float:
        """What one block keeps between its forward and its backward."""
        return GRAPH_BYTES * sequences * self.tokens * self.width


@dataclass(frozen=True)
class Device:
    """Speed of a device: `peak` FLOP/s times `share`, less for small batches."""

    peak: float = 312e12
    share: float = 0.4
    half: float = 1024.0  # tokens at which a kernel reaches half of the share

    def seconds(self, flops: float, tokens: float) -> float:
        return flops / (self.peak * self.share) * (1 + self.half / tokens)


Cost = Callable[[Call], float]
Bytes = Callable[[str], float]  # of a tensor that travels


@dataclass(frozen=True)
class Priced:
    """A step."""

    seconds: float  # the longer of critical path and driver
    path: float
    driver: float
    calls: int
    moved: float  # bytes that travel in the step
    wave: float  # the most that travels after one wave (phase and level)


def price(
    calls: Sequence[Call], hosts: int, cost: Cost, size: Bytes, link: Link, ray: Runtime
) -> Priced:
    """The critical path of a step."""
    free, out = [0.0] * hosts, [0.0] * hosts  # when an actor, and its link, is free
    there: dict[tuple[int, str], float] = {}  # when a tensor has arrived at those who read it
    waves: dict[tuple[int, str, int], float] = {}
    for k, call in enumerate(calls):
        inputs = [there[call.piece, name] for name in call.inputs]
        arrived = max(inputs, default=0.0) + ray.hop
        start = max((k + 1) * ray.submit, free[call.host], arrived)
        end = free[call.host] = start + cost(call)
        for packet in call.packets:
            load = sum(map(size, packet))
            out[call.host] = max(out[call.host], end) + load / link.bandwidth
            there.update({(call.piece, name): out[call.host] + link.latency for name in packet})
            key = (call.piece, call.phase, call.level)
            waves[key] = waves.get(key, 0.0) + load
    path, driver = max(free), ray.submit * (len(calls) + hosts)  # and one `finish` per actor
    return Priced(
        max(path, driver),
        path,
        driver,
        len(calls),
        sum(waves.values()),
        max(waves.values(), default=0),
    )


def layout_for(tree: Tree, devices: int) -> Layout:
    """The packed layout on so many devices; more than one per line cannot be used."""
    return pack(tree, min(devices, len(lines(tree))))


def tree_step(
    net: Network, layout: Layout, pieces: int, device: Device, link: Link, ray: Runtime
) -> Priced:
    """A TreeProp step with beta = 0: a right block's forward and backward are one op, `answer`."""
    sequences = net.batch / pieces
    tokens = sequences * net.tokens
    block = device.seconds(net.block_flops(sequences), tokens)
    head = device.seconds(net.head_flops(sequences), tokens)
    tree = net.tree
    passes = {"lift": 1, "answer": 3, "backward": 2}

    def op_cost(op: Op) -> float:
        if op.verb not in passes:
            return 3 * head if op.verb == "head" else 0.0
        node = tree.nodes[op.n]
        edge = node.right if op.verb == "answer" else node.left
        return passes[op.verb] * tree.layers(edge) * block

    calls = one_step(tree, Rule(objective="node"), layout, True, pieces)
    cost: Cost = lambda call: sum(map(op_cost, call.ops))  # noqa: E731
    each = net.state_bytes(sequences)
    return price(calls, len(layout.hosts), cost, lambda _: each, link, ray)


def host_parameters(net: Network, layout: Layout) -> dict[int, float]:
    """Parameters of every host: two blocks of a node, one on the spine; the head."""
    tree = net.tree
    held = dict.fromkeys(layout.hosts, 0.0)
    held[layout.boundary] += net.head_parameters
    for node in tree.nodes.values():
        right = 0 if tree.is_spine(node) else tree.layers(node.right)
        held[layout.host_of[node.n]] += (tree.layers(node.left) + right) * net.block_parameters
    return held


def copied(step: Priced, copies: int, hosts: int, most: float, link: Link, ray: Runtime) -> Priced:
    """A step of one copy and its share of the batch; then each host adds up its gradients, of at
    most `most` parameters, with its twins. Nothing is taken to hide behind the backward pass."""
    if copies == 1:
        return step
    exchange = 2 * (copies - 1) / copies * 4 * most / link.bandwidth + 2 * (link.latency + ray.hop)
    driver = copies * (step.driver + 2 * ray.submit * hosts)
    path = step.path + exchange
    return replace(step, seconds=max(path, driver), path=path, driver=driver)


def copies_step(
    net: Network, devices: int, copies: int, pieces: int, device: Device, link: Link, ray: Runtime
) -> Priced:
    """Trees times replicas."""
    layout = layout_for(Tree(net.N), devices // copies)
    step = tree_step(replace(net, batch=net.batch // copies), layout, pieces, device, link, ray)
    most = max(host_parameters(net, layout).values())
    return copied(step, copies, len(layout.hosts), most, link, ray)


def pipelines_step(
    net: Network, devices: int, copies: int, pieces: int, device: Device, link: Link, ray: Runtime
) -> Priced:
    """Pipelines times replicas."""
    count = min(devices // copies, net.N)
    step = pipeline_step(replace(net, batch=net.batch // copies), count, pieces, device, link, ray)
    most = max(-(-net.N // count) * net.block_parameters, net.head_parameters)
    return copied(step, copies, count, most, link, ray)


def copies_memory(net: Network, devices: int, copies: int, pieces: int) -> float:
    """The fullest actor of a copy."""
    layout = layout_for(Tree(net.N), devices // copies)
    return tree_memory(replace(net, batch=net.batch // copies), layout, pieces)


def pipeline_step(
    net: Network, count: int, pieces: int, device: Device, link: Link, ray: Runtime
) -> Priced:
    """Backpropagation over a chain of `count` stages (GPipe's cut, one forward one backward)."""
    sequences = net.batch / pieces
    tokens = sequences * net.tokens
    block = device.seconds(net.block_flops(sequences), tokens)
    head = device.seconds(net.head_flops(sequences), tokens)
    cuts = stages(Tree(net.N), count)

    def op_cost(op: Op) -> float:
        if op.verb == "head":
            return 3 * head
        plain = len(cuts[op.n]) - (1 if op.n == count - 1 else 0)  # the last has the head
        return {"ahead": 1, "back": 2}.get(op.verb, 0) * plain * block

    cost: Cost = lambda call: sum(map(op_cost, call.ops))  # noqa: E731
    each = net.state_bytes(sequences)
    size: Bytes = lambda name: 0.0 if name == "y" else each  # noqa: E731
    return price(one_chain_step(count, True, pieces), count, cost, size, link, ray)


def replica_step(net: Network, replicas: int, device: Device, link: Link) -> float:
    """Data-parallel backpropagation: a share of the batch each, then a ring all-reduce.

    Half of the exchange is taken to hide behind the backward pass.
    """
    sequences = net.batch / replicas
    tokens = sequences * net.tokens
    blocks = (net.N - 1) * net.block_flops(sequences) + net.head_flops(sequences)
    gradients = 4 * ((net.N - 1) * net.block_parameters + net.head_parameters)
    exchange = 2 * (replicas - 1) / replicas * gradients / link.bandwidth
    return 3 * device.seconds(blocks, tokens) + 0.5 * exchange + 2 * (replicas - 1) * link.latency


# -- memory of one device --------------------------------------------------------------------------


def tree_memory(net: Network, layout: Layout, pieces: int) -> float:
    """The fullest actor: parameters, and graphs of left blocks whose adjoints are still to come."""
    tree = net.tree
    alive = min(pieces, 2 * tree.depth) * net.graph_bytes(net.batch / pieces)
    held = {host: TRAIN_BYTES * n for host, n in host_parameters(net, layout).items()}
    for node in tree.nodes.values():
        graph = 0.0 if node.is_leaf else alive * tree.layers(node.left)
        held[layout.host_of[node.n]] += graph
    return max(held.values())


def pipelines_memory(net: Network, devices: int, copies: int, pieces: int) -> float:
    """The fullest stage of a copy."""
    count = min(devices // copies, net.N)
    return pipeline_memory(replace(net, batch=net.batch // copies), count, pieces)


def pipeline_memory(net: Network, count: int, pieces: int) -> float:
    """The first stage, which keeps the most pieces, or the last, which has the head."""
    per_stage = -(-net.N // count)
    graphs = min(pieces, count) * per_stage * net.graph_bytes(net.batch / pieces)
    first = TRAIN_BYTES * per_stage * net.block_parameters + graphs
    return max(first, TRAIN_BYTES * net.head_parameters + graphs / min(pieces, count))


def replica_memory(net: Network, replicas: int) -> float:
    """The whole network, and the graphs of a share of the batch."""
    parameters = (net.N - 1) * net.block_parameters + net.head_parameters
    return TRAIN_BYTES * parameters + net.N * net.graph_bytes(net.batch / replicas)


def best(options: Sequence[int], step: Callable[[int], Priced]) -> tuple[int, Priced]:
    """The number of micro-batches with the shortest step."""
    return min(((m, step(m)) for m in options), key=lambda pair: pair[1].seconds)
