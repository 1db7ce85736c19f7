"""The binary tree over the blocks of a chain: intervals, levels, edges, paths. Pure Python.

A chain of N blocks has states z_0 … z_N. The interval (l, r) is cut at a node n into (l, n) and
(n, r), again and again until every piece has length 1. N = 8, `split="floor"`:

    level 1              0 ─────────────── 4 ─────────────── 8
    level 2              0 ───── 2 ─────── 4 ───── 6 ─────── 8
    level 3              0 ─ 1 ─ 2 ─ 3 ─── 4 ─ 5 ─ 6 ─ 7 ─── 8

Every interval but the root is an *edge*, an edge is a block, and the node that made it owns it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treeprop_ray.core.grouping import Grouping

Edge = tuple[int, int]


def _floor(l: int, r: int) -> int:
    return (l + r) // 2


def _right_full(l: int, r: int) -> int:
    return r - 2 ** ((r - l - 1).bit_length() - 1)


SPLITS: dict[str, Callable[[int, int], int]] = {"floor": _floor, "right_full": _right_full}


@dataclass(frozen=True)
class Node:
    """A tree node: state n, made inside the interval (l, r) at `level` (the root has level 1)."""

    n: int
    l: int
    r: int
    level: int

    @property
    def left(self) -> Edge:
        """The edge of the block f_left: z_l -> mu_fwd."""
        return (self.l, self.n)

    @property
    def right(self) -> Edge:
        """The edge of the block f_right: mu_fwd -> z_r_hat."""
        return (self.n, self.r)

    @property
    def is_leaf(self) -> bool:
        """Both edges are chain blocks, so nobody consumes z_n."""
        return self.r - self.l == 2


class Tree:
    """All nodes of the tree over a chain of N blocks (the head is block N)."""

    def __init__(self, N: int, split: str = "floor", grouping: Grouping | None = None) -> None:
        """`grouping`: where blocks have several layers."""
        if N < 2:
            raise ValueError(f"N={N}: a tree needs N >= 2 blocks (the head counts as one)")
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: one of {', '.join(SPLITS)}")
        self.N, self.split, self.grouping = N, split, grouping
        self.nodes: dict[int, Node] = {}
        stack = [(0, N, 1)]
        while stack:
            l, r, level = stack.pop()
            if r - l >= 2:
                n = SPLITS[split](l, r)
                self.nodes[n] = Node(n, l, r, level)
                stack += [(l, n, level + 1), (n, r, level + 1)]
        self.nodes = dict(sorted(self.nodes.items()))

    @cached_property
    def depth(self) -> int:
        """D = ceil(log2 N), the number of levels."""
        return max(node.level for node in self.nodes.values())

    @cached_property
    def root(self) -> Node:
        return self.by_interval[(0, self.N)]

    @cached_property
    def by_interval(self) -> dict[Edge, Node]:
        """The node that cuts an interval."""
        return {(node.l, node.r): node for node in self.nodes.values()}

    def level(self, s: int) -> list[Node]:
        """The nodes of level s from left to right."""
        return [node for node in self.nodes.values() if node.level == s]

    def left_child(self, node: Node) -> Node | None:
        return self.by_interval.get(node.left)

    def right_child(self, node: Node) -> Node | None:
        return self.by_interval.get(node.right)

    @cached_property
    def parents(self) -> dict[int, int]:
        """The parent of every node but the root."""
        found = self.by_interval.get
        pairs = [(found(e), node) for node in self.nodes.values() for e in (node.left, node.right)]
        return {child.n: node.n for child, node in pairs if child}

    def is_spine(self, node: Node) -> bool:
        """Whether the right edge is the head: only these nodes meet the labels."""
        return node.r == self.N

    @cached_property
    def spine(self) -> list[Node]:
        """The rightmost nodes from the root down."""
        return sorted((n for n in self.nodes.values() if n.r == self.N), key=lambda n: n.level)

    # -- edges: one per block ---------------------------------------------------------------

    def block_of(self, edge: Edge) -> Edge:
        """The edge whose weights serve `edge`: every edge that ends at N is the head (N-1, N)."""
        return (self.N - 1, self.N) if edge[1] == self.N else edge

    @cached_property
    def edges(self) -> list[Edge]:
        """All 2N - 2 intervals below the root, sorted: N of length 1 and N - 2 longer ones."""
        return sorted(e for node in self.nodes.values() for e in (node.left, node.right))

    @cached_property
    def blocks(self) -> list[Edge]:
        """The distinct sets of weights, sorted; the head once."""
        return sorted({self.block_of(e) for e in self.edges})

    @cached_property
    def head(self) -> Edge:
        return (self.N - 1, self.N)

    def layers(self, edge: Edge) -> int:
        """Layers of the block that serves an edge; the head counts as one."""
        return len(self.grouping.layers(edge)) if self.grouping else 1

    # -- paths: networks that are read off the tree -----------------------------------------

    @cached_property
    def chain(self) -> list[int]:
        """The full path 0, 1, …, N: the deployed network."""
        return list(range(self.N + 1))

    @cached_property
    def spine_paths(self) -> list[list[int]]:
        """Prefixes of the spine, shortest first: [0, 4, 8], [0, 4, 6, 8], [0, 4, 6, 7, 8]."""
        indices = [node.n for node in self.spine]
        return [[0, *indices[: k + 1], self.N] for k in range(len(indices))]

    def path_edges(self, path: Sequence[int]) -> list[Edge]:
        """The blocks along `path`; an error names the first pair that is no edge."""
        if len(path) < 2 or path[0] != 0 or path[-1] != self.N:
            raise ValueError(f"path={list(path)}: must start at 0 and end at N={self.N}")
        pairs = list(itertools.pairwise(path))
        known = set(self.edges)
        for pair in pairs:
            if pair not in known:
                ends = sorted(r for l, r in known if l == pair[0])
                raise ValueError(
                    f"path={list(path)}: {pair[0]}->{pair[1]} is no edge of this tree; "
                    f"from {pair[0]} one can go to {ends}"
                )
        return [self.block_of(pair) for pair in pairs]

    @cached_property
    def named_paths(self) -> dict[str, list[int]]:
        """`spine-k` (k blocks before the head) for the short paths and `full` for the chain."""
        named = {f"spine-{len(p) - 2}": p for p in self.spine_paths if p != self.chain}
        return {**named, "full": self.chain}


def ideal_span(N: int) -> float:
    """Critical path of backpropagation (2N) over that of TreeProp (2D): N / ceil(log2 N)."""
    return N / (N - 1).bit_length()
