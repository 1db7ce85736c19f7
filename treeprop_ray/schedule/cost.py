"""What a step costs in applications of a layer: in all, and one after the other. Pure Python.

A forward of a layer (or the head) to the batch is 1, a backward is 1; sending is free. The critical
path is that of the real calls with an actor for every node: a call starts when its actor is free
and its inputs are there. `pricing.py` prices the same calls in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.coarse import coarse_calls
from treeprop_ray.schedule.ops import Call, Layout, Op
from treeprop_ray.schedule.sweeps import sweep_calls, units_of
from treeprop_ray.schedule.tree import one_step


@dataclass(frozen=True)
class Cost:
    """A step: applications of layers in all, those of the critical path, and layers held: trained
    in all, and in the actor that has most, which keeps as many layers' activations."""

    work: float
    path: float
    trained: int
    fullest: int

    def mixed(self, others: Sequence[tuple[float, Cost]]) -> Cost:
        """The mean step of a run that has shares of its steps from other programs, which work on
        layers that are there already."""
        mine = 1 - sum(share for share, _ in others)
        shares = [(mine, self), *others]
        work, path = (
            sum(share * figure(cost) for share, cost in shares)
            for figure in (attrgetter("work"), attrgetter("path"))
        )
        return Cost(work, path, self.trained, self.fullest)

    def line(self, chain: Cost) -> str:
        """Work and critical path in words, beside backpropagation."""
        return (
            f"work {self.work:g} (backpropagation {chain.work:g}), critical path {self.path:g} "
            f"({100 * self.path / chain.path:.0f} % of {chain.path:g})"
        )

    def against(self, chain: Cost) -> str:
        """In words, beside backpropagation of the same chain."""
        return (
            f"{self.line(chain)}, trained {self.trained} ({chain.trained}), in the fullest actor "
            f"{self.fullest}"
        )


def span(calls: Sequence[Call], cost: Callable[[Call], float]) -> float:
    """When the last call ends."""
    free: dict[int, float] = {}
    ready: dict[tuple[int, str], float] = {}
    for call in calls:
        begin = max([free.get(call.host, 0.0), *(ready[call.piece, n] for n in call.inputs)])
        free[call.host] = end = begin + cost(call)
        ready.update({(call.piece, name): end for name in call.outputs})
    return max(free.values())


def chain_cost(tree: Tree, path: Sequence[int] | None = None) -> Cost:
    """Backpropagation of the chain, or of another path: everything waits for everything."""
    layers = sum(map(tree.layers, tree.path_edges(path or tree.chain)))
    return Cost(2 * layers, 2 * layers, layers, layers)


def sweep_cost(tree: Tree, rule: Rule, sweeps: int) -> Cost:
    """A step of the chain by sweeps, with an actor for every node."""
    calls = sweep_calls(tree, rule, Layout({n: n for n in tree.nodes}), True, 1, sweeps)
    layers = {unit.edges[-1][1]: sum(map(tree.layers, unit.edges)) for unit in units_of(tree)}

    def cost(call: Call) -> float:
        swept = sum(layers[op.n] for op in call.ops if op.n in layers and op.verb != "open")
        return swept + 2 * sum(op.verb == "reach" for op in call.ops)

    held = sum(layers.values()) + 1
    return Cost(sum(map(cost, calls)), span(calls, cost), held, max(layers.values()))


def tree_cost(tree: Tree, rule: Rule, level: int = 0) -> Cost:
    """A step of the tree with an actor for every node; `level`: without the levels from there on
    (schedule/coarse.py)."""
    layout = Layout({n: n for n in tree.nodes})
    if level:
        calls = coarse_calls(tree, rule, layout, True, 1, level)
    else:
        calls = one_step(tree, rule, layout, True)

    def price(op: Op) -> int:
        if op.verb in ("head", "hint"):
            return 2
        if op.verb in ("ahead", "back"):
            return tree.layers((op.n - 1, op.n))
        if op.verb not in ("lift", "answer", "predict", "backward"):
            return 0
        node = tree.nodes[op.n]
        if op.verb in ("answer", "predict"):
            asked = rule.right_weight(tree, node) > 0 or rule.beta > 0
            return 2 * tree.layers(node.right) if asked else 0
        return tree.layers(node.left)

    def cost(call: Call) -> float:
        return rule.mc_samples * sum(map(price, call.ops))

    held = [
        tree.layers(node.left) + (0 if tree.is_spine(node) else tree.layers(node.right))
        for node in tree.nodes.values()
    ]
    return Cost(
        work=sum(map(cost, calls)),
        path=span(calls, cost),
        trained=sum(map(tree.layers, tree.blocks)),
        fullest=max(held),
    )
