"""Backward through a block in two steps: the gradient at its input, and later those of its weights.

Another host may wait for the first, nobody waits for the others before the update. Both steps
together do the same products as one backward pass, with the same results.

    leaf ── norm ──●── product ──●── … ── out        ● forks: they lead to the leaf and to weights
                 weight        weight                first step: through all ●, gradients there kept
                                                     second step: from each ● to its weights
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Forks = dict[Node, list[Tensor]]  # nodes that lead to the leaf and, aside from it, to weights


def input_first(out: Tensor, slope: Tensor, leaf: Tensor) -> Callable[[], None]:
    """Set leaf.grad for the gradient `slope` at `out`; call what is returned for the weights."""
    if not leaf.requires_grad:
        return partial(out.backward, slope)
    forks = forks_between(out, leaf)
    weights = [id(w) for found in forks.values() for w in found]
    if len(weights) != len(set(weights)):  # used twice: a fork's gradient would count double
        out.backward(slope)
        return lambda: None
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def keep(node: Node, gradients: tuple[Tensor | None, ...]) -> None:
        arrived[node] = gradients

    hooks = [node.register_prehook(partial(keep, node)) for node in forks]
    try:
        (leaf.grad,) = torch.autograd.grad(out, leaf, slope, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()

    def weights_later() -> None:
        for node, found in forks.items():
            reached = [(i, g) for i, g in enumerate(arrived[node]) if g is not None]
            edges = [GradientEdge(node, i) for i, _ in reached]
            # adds up as one pass does: a first gradient is kept, not copied to memory that is new
            torch.autograd.backward(edges, [g for _, g in reached], inputs=found)

    return weights_later


def forks_between(out: Tensor, leaf: Tensor) -> Forks:
    """The forks of the graph between the leaf and `out`, each with the weights behind it."""
    goal, start = get_gradient_edge(leaf).node, get_gradient_edge(out).node
    behind: dict[Node, list[Node]] = {goal: []}  # each node is asked once: an answer is slow
    leads: dict[Node, bool] = {goal: True}  # to the leaf?
    stack = [start]
    while stack:
        node = stack[-1]
        if node not in behind:
            behind[node] = [fn for fn, _ in node.next_functions if fn is not None]
            if unseen := [fn for fn in behind[node] if fn not in leads]:
                stack += unseen
                continue
        if node not in leads:
            leads[node] = any(leads[fn] for fn in behind[node])
        stack.pop()
    forks: Forks = {}
    for node, leading in leads.items():
        if leading and (aside := [fn for fn in behind[node] if not leads[fn]]):
            forks[node] = _weights_of(aside, behind)
    return forks


def _weights_of(nodes: list[Node], behind: Mapping[Node, Sequence[Node]]) -> list[Tensor]:
    """All leaves that nodes of a graph lead to."""
    found: dict[Node, Tensor | None] = {}
    while nodes:
        node = nodes.pop()
        if node not in found:
            found[node] = None if behind[node] else getattr(node, "variable", None)
            nodes += behind[node]
    return [weight for weight in found.values() if weight is not None]
