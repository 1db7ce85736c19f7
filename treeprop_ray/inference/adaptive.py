"""Adaptive inference: short paths first, and a sample stops where the softmax is confident.

The exits are the spine paths, shortest first, and the full chain as the last resort. Along the
spine every exit adds one block to the one before; the chain starts anew from z_0, so a sample that
gets there has paid for the whole spine as well (N = 8: 1, 2, 3 and 3 + 7 = 10 blocks).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treeprop_ray import methods
from treeprop_ray.config import Settings
from treeprop_ray.core.factor import full
from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.core.scoring import path_states
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError
from treeprop_ray.inference.paths import Network, network_through

THRESHOLDS = [0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0]
# A softmax is below 1 whatever it is rounded to, so threshold 1 always goes to the full chain.
BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class Exits:
    """What every exit would answer for every sample: shape (exits, samples)."""

    names: tuple[str, ...]
    blocks: tuple[int, ...]  # blocks run before the head when a sample leaves here
    confidence: Tensor  # softmax maximum, float64, below 1
    correct: Tensor  # bool


class Point(NamedTuple):
    """A threshold's outcome: share of correct samples, mean blocks run, share leaving per exit."""

    threshold: float
    accuracy: float
    blocks: float
    left_at: tuple[float, ...]


def thresholds_of(given: Any) -> list[float]:
    """A number or a list of numbers in [0, 1]; None is the default list."""
    values = THRESHOLDS if given is None else given if isinstance(given, list) else [given]
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= 1:
            raise UserError(f"threshold={given}: a number in [0, 1], or a list such as [0.5,0.9,1]")
    if not values:
        raise UserError("threshold=[]: at least one number in [0, 1]")
    return sorted({float(value) for value in values})


def with_exits(network: Network, settings: Settings) -> TreeNetwork:
    """The network of a run whose samples may stop early; UserError where they cannot."""
    method = methods.of(settings)
    if not method.short_paths or not isinstance(network, TreeNetwork):
        kind = f"method={method.name} model.name={settings.model.name}"
        raise UserError(f"mode=adaptive: a run with {kind} has no short paths")
    if settings.loss.name != "cross_entropy":
        raise UserError(
            f"mode=adaptive: a sample stops where the softmax is confident, and a run with "
            f"loss.name={settings.loss.name} has none; use path=all"
        )
    if settings.model.name == "gpt":
        raise UserError(
            "mode=adaptive: a token that stops early leaves no state for later tokens to "
            "attend to; use path=all, or generate with draft="
        )
    return network


def blocks_run(tree: Tree, paths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Blocks run in total after each of the paths; beginnings that paths share run once."""
    states: set[tuple[Edge, ...]] = set()
    counts = []
    for path in paths:
        edges = tree.path_edges(path)[:-1]
        states |= {tuple(edges[:k]) for k in range(1, len(edges) + 1)}
        counts.append(sum(tree.layers(state[-1]) for state in states))
    return tuple(counts)


def look(
    network: TreeNetwork, batches: Iterable[tuple[Tensor, Tensor]], ignore_index: int = -100
) -> Exits:
    """Ask every exit about every sample, once; any threshold can be read off the result.

    Labels with `ignore_index` are left out.
    """
    tree, through = network.tree, network_through(network)
    paths = tree.named_paths
    confidence: list[Tensor] = []
    correct: list[Tensor] = []
    for x, y in batches:
        states = path_states(tree, paths, x, through)
        logits = torch.stack([full(through(tree.head, z)).flatten(0, -2) for z in states.values()])
        keep = y.flatten() != ignore_index
        logits, y = logits[:, keep], y.flatten()[keep]
        confidence.append(logits.double().softmax(-1).amax(-1).clamp(max=BELOW_ONE))
        correct.append(logits.argmax(-1) == y)
    return Exits(
        tuple(paths),
        blocks_run(tree, list(paths.values())),
        torch.cat(confidence, 1),
        torch.cat(correct, 1),
    )


def at_threshold(exits: Exits, threshold: float) -> Point:
    """Every sample leaves at its first exit with confidence >= threshold, at last at the end."""
    confident = exits.confidence >= threshold
    confident[-1] = True
    first = confident.int().argmax(0)  # the first exit that is True
    correct = exits.correct.gather(0, first[None])[0]
    left_at = torch.bincount(first, minlength=len(exits.names)).tolist()
    n = len(first)
    return Point(
        threshold,
        int(correct.sum()) / n,
        sum(count * blocks for count, blocks in zip(left_at, exits.blocks, strict=True)) / n,
        tuple(count / n for count in left_at),
    )


def table_of(points: Sequence[Point], names: Sequence[str]) -> str:
    """Accuracy, mean blocks and the share of samples that leave at each exit, as plain text."""
    exits = "  ".join(f"{'at ' + name:>10}" for name in names)
    lines = [f"{'threshold':>9}  {'accuracy':>9}  {'blocks':>6}  {exits}"]
    for p in points:
        shares = "  ".join(f"{100 * share:>8.1f} %" for share in p.left_at)
        lines.append(f"{p.threshold:>9g}  {100 * p.accuracy:>7.2f} %  {p.blocks:>6.2f}  {shares}")
    return "\n".join(lines)


def fixed_paths(exits: Exits, tree: Tree) -> dict[str, tuple[int, float]]:
    """(blocks, accuracy) of every path on its own, to compare with."""
    accuracy = exits.correct.double().mean(1).tolist()
    edges = {name: tree.path_edges(path)[:-1] for name, path in tree.named_paths.items()}
    return {
        name: (sum(map(tree.layers, edges[name])), accuracy[i])
        for i, name in enumerate(exits.names)
    }


def outcomes(
    network: Network, settings: Settings, batches: Iterable[tuple[Tensor, Tensor]], threshold: Any
) -> tuple[list[Point], dict[str, tuple[int, float]]]:
    """The outcome of every threshold, and (blocks, accuracy) of every exit's path on its own."""
    tree_network = with_exits(network, settings)
    exits = look(tree_network, batches, settings.loss.ignore_index)
    points = [at_threshold(exits, t) for t in thresholds_of(threshold)]
    return points, fixed_paths(exits, tree_network.tree)
