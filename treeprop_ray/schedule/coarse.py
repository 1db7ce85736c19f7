"""A step of a tree without its finest levels, over the hosts of the whole one. Pure Python.

Levels from `level` on are left out. What a node of that level would have split stays one segment:
the chain's blocks from z_l to z_r, trained together, by the distance of their end from z_r, or by
the label. Blocks of the levels above are used as before. N = 8, level 2:

    level 1    0 ═══════════════ 4                           node 4: the auxiliary block 0-4
    segments   0 ── 1 ── 2 ── 3 ── (4)   4 ── 5 ── 6 ── 7 ── head

    boundary   open                                          head            close
    node 4          F4                                                 B4
    node 1              ahead 0-1 1-2                 back 2-1 1-0
    node 3                           ahead 2-3 3-4 meet back 4-3 3-2
    node 5               ahead 4-5 5-6 …

So blocks of one layer become blocks of four, and auxiliary ones stay where a tree of such blocks
has some. Level 1 is the whole chain: backpropagation. Fine blocks keep their owners, optimizer
state and names.

Inside a segment states are z<i> and adjoints a<i>; its end is e<r>, beside the tree's z<r>. What
the segment of node n hands up is l<n> and r<n>, as the node would.
"""

from __future__ import annotations

import itertools
import math

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Node, Tree
from treeprop_ray.schedule.ops import Call, Layout, Op, Row, Wave, interleave, make_calls
from treeprop_ray.schedule.owner import owner_of
from treeprop_ray.schedule.tree import Flow


def coarse_calls(
    tree: Tree, rule: Rule, layout: Layout, stem_trains: bool, pieces: int, level: int
) -> list[Call]:
    """The calls of a step whose levels from `level` on are segments."""
    each = [coarse_waves(tree, rule, layout, stem_trains, m, level) for m in range(pieces)]
    return interleave(each, stride=3)


class Segment:
    """The interval of a node as one block, and the ops over its edges."""

    def __init__(self, flow: Flow, node: Node) -> None:
        tree = flow.tree
        self.flow, self.node, self.spine = flow, node, tree.is_spine(node)
        self.stop = tree.N - 1 if self.spine else node.r
        edges = [(i, i + 1) for i in range(node.l, self.stop)]
        hosts = [(flow.at[owner_of(tree, edge).n], edge) for edge in edges]
        self.runs = [  # consecutive blocks of one host share a call
            (h, [e for _, e in run]) for h, run in itertools.groupby(hosts, lambda pair: pair[0])
        ]
        self.length = len(edges)

    @property
    def end(self) -> str:
        """The last state: beside the tree's z_r, if that is its target."""
        return f"z{self.stop}" if self.spine else f"e{self.stop}"

    def ahead(self, l: int, r: int) -> Op:
        """A block."""
        made = self.end if r == self.stop else f"z{r}"
        return Op("ahead", r, (f"z{l}", *self.flow.rule.side_inputs), (made,))

    def back(self, l: int, r: int) -> Op:
        """The same block, backward; the first one may have an adjoint to hand up."""
        up = f"l{self.node.n}"
        first = up if up in self.flow.hands_up(self.node) else f"a{l}.{self.node.n}"
        return Op("back", r, (f"a{r}",), (first if l == self.node.l else f"a{l}",))

    def turn(self) -> tuple[int, list[Op]]:
        """At the end, in the head's host or in that of the last block: the loss and its slope."""
        n, slope = self.node.n, f"a{self.stop}"
        if self.spine:
            last = self.flow.tree.spine[-1].n  # the node whose cross-entropy this is
            head = Op("head", last, (self.end,), (f"g{last}",))
            return self.flow.boundary, [head, Op("turn", last, (f"g{last}",), (slope,))]
        right = tuple(name for name in self.flow.hands_up(self.node) if name == f"r{n}")
        return self.runs[-1][0], [Op("meet", n, (self.end, f"z{self.stop}"), (slope, *right))]

    def rows(self, clock: int, turn: int) -> list[Row]:
        """Forward from `clock` on, a tick for each block; the loss at `turn`; and back."""
        level, l = self.node.level, self.node.l
        host, ops = self.turn()
        rows: list[Row] = [(turn, "head" if self.spine else "meet", level, {host: ops})]
        for at, run in self.runs:
            ahead = [self.ahead(*edge) for edge in run]
            rows.append((clock + run[0][0] - l, "forward", level, {at: ahead}))
            back = [self.back(*edge) for edge in reversed(run)]
            rows.append((turn + self.stop - run[-1][0], "backward", level, {at: back}))
        return rows


def coarse_waves(
    tree: Tree, rule: Rule, layout: Layout, stem_trains: bool, piece: int, level: int
) -> list[Wave]:
    """The waves of one piece. Clocks count blocks, not calls, so head and stem meet the pieces in
    the same order wherever the blocks live."""
    flow = Flow(tree, rule, layout, stem_trains, piece)
    # an interval of two blocks is a leaf, as it always is
    segments = [Segment(flow, node) for node in tree.level(level) if not node.is_leaf]
    nodes = [n for n in tree.nodes.values() if n.level < level or (n.level == level and n.is_leaf)]
    longest = max((segment.length for segment in segments), default=0)
    first = 3 * level - 2
    # heads of a level have one of two clocks, as they live apart or not: neither is divided by 3
    turn = 3 * math.ceil((first + longest) / 3)
    up = turn + longest + 1
    last = 3 * math.ceil((up + level) / 3)
    rows: list[Row] = [(0, "stem", 0, {layout.boundary: flow.open()})]
    for segment in segments:
        rows += segment.rows(first, turn)
    for node in nodes:
        s, host, ops = node.level, layout.host_of[node.n], flow.phases(node)
        rows += [
            (3 * s - 2, "forward", s, {host: ops.forward}),
            (3 * s - 1, "head", s, {layout.boundary: ops.head}),
            (3 * s, "aside", s, {host: ops.aside}),
            (up + level - s, "backward", s, {host: [o for o in ops.backward if o.verb != "close"]}),
        ]
    if stem_trains:
        close = [Op("close", 0, (f"l{tree.root.n}",))]
        rows.append((last, "stem_backward", 0, {layout.boundary: close}))
    rows = [row for row in rows if all(row[3].values())]
    return make_calls(sorted(rows, key=lambda row: row[0]), piece, layout.one_machine)
