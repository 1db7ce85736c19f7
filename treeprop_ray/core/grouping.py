"""Several layers in one block of a tree: which layers each edge has. Pure Python.

A chain of 7 layers and a head in blocks of 2, 2 and 3 layers, auxiliary blocks of 2:

    layers   0 ─ 1 ─ 2 ─ 3 ─ 4 ─ 5 ─ 6 ─ 7 ─ 8        states of single layers, 8 the head's
    blocks   0 ───── 1 ───── 2 ───────── 3 ─ 4        states of the tree, N = 4
    0 → 2    0 ───── 2 ───── 4                        an auxiliary block: layers 0-2 and 2-4

A layer is named by the single states between which it stands. The chain's layers are those of the
network without groups, under the same names and with the same initial weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from treeprop_ray.config import Model

MOST_BLOCKS = 64  # that `deepest` tries


@dataclass(frozen=True)
class Grouping:
    """The states of single layers at which the tree's states stand, and the auxiliary layers."""

    cuts: tuple[int, ...]
    auxiliary: int = 1

    @property
    def N(self) -> int:
        """Blocks of the tree, the head counts."""
        return len(self.cuts)

    @property
    def head(self) -> Edge:
        """The head among single layers."""
        return self.cuts[-1], self.cuts[-1] + 1

    def layers(self, edge: Edge) -> list[Edge]:
        """The layers of a block of the tree."""
        l, r = edge
        if r == self.N:
            return [self.head]
        first, last = self.cuts[l], self.cuts[r]
        count = last - first if r - l == 1 else min(self.auxiliary, last - first)
        marks = [first + (last - first) * k // count for k in range(count + 1)]
        return list(itertools.pairwise(marks))


def sizes_of(group: Sequence[int], layers: int) -> list[int]:
    """Layers of every block: one number is for all, and the last ones take what is over."""
    if not group:
        return [1] * layers
    if len(group) == 1:
        return even(layers, max(1, layers // group[0]))
    if sum(group) != layers:
        raise UserError(
            f"group={list(group)}: has {sum(group)} layers, must have the {layers} before the head"
        )
    return list(group)


def even(layers: int, blocks: int) -> list[int]:
    """So many blocks, the last ones a layer longer where it does not divide."""
    short, longer = divmod(layers, blocks)
    return [short] * (blocks - longer) + [short + 1] * longer


def grouping(sizes: Sequence[int], auxiliary: int = 1) -> Grouping | None:
    """The grouping of blocks of these sizes; None where every block is one layer."""
    if max(sizes) == 1 and auxiliary == 1:
        return None
    return Grouping((0, *itertools.accumulate(sizes)), auxiliary)


def grouping_of(model: Model, layers: int, split: str) -> Grouping | None:
    """What the settings say for a chain of so many layers."""
    if model.span:
        return deepest(layers, model.auxiliary_layers, model.span, split)
    return grouping(sizes_of(model.group, layers), model.auxiliary_layers)


def deepest(layers: int, auxiliary: int, share: float, split: str) -> Grouping | None:
    """Of nearly even blocks those with the deepest tree within a share of the chain's path, the
    shortest path among them, and the fewest blocks; if none is within it, the shortest path."""
    choices = []
    for blocks in range(1, min(layers, MOST_BLOCKS) + 1):
        chosen = grouping(even(layers, blocks), auxiliary)
        tree = Tree(blocks + 1, split, chosen)
        path = longest_line(tree)
        spine = sum(map(tree.layers, tree.path_edges(tree.spine_paths[-1])))
        within = path <= share * (layers + 1)
        choices.append(((within, spine if within else 0, -path, -blocks), chosen))
    return max(choices, key=lambda choice: choice[0])[1]


def longest_line(tree: Tree) -> int:
    """Layers, one after the other, from z_0 to the last answer: left blocks down to a node, then
    its right block or the head. A step with beta = 0 goes forward and backward through them, at
    most: `schedule/cost.py` walks the calls."""
    down = {tree.root.n: tree.layers(tree.root.left)}
    for node in sorted(tree.nodes.values(), key=lambda node: node.level)[1:]:
        down[node.n] = down[tree.parents[node.n]] + tree.layers(node.left)
    asks = [n for n in tree.nodes.values() if not tree.is_spine(n) or n.is_leaf]
    return max(down[node.n] + tree.layers(node.right) for node in asks)
