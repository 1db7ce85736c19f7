"""The chain begins its last steps as the deepest path (finish_from=path). Pure Python, no torch.

The deepest path along the spine learns from the label, the chain's blocks learn to imitate states;
so the path is ahead of the chain. Before the first step along the chain every auxiliary block of
the path hands its layers to the chain's blocks beside it, and what is left of these adds nothing
yet: the chain then is the path, with layers that learn from there on.

    path     0 ─────────────── 4 ─────── 6 ─── 7 ─── 8
    chain    0 ─── 1 ┄┄┄ 2 ┄┄┄ 3 ┄┄┄ 4 ─── 5 ┄┄┄ 6 ─── 7 ─── 8        ┄┄┄ adds nothing

    node 4          give 0-4
    nodes 1, 3               take 0-1 1-2 2-3 3-4
    node 6          give 4-6
    node 5                   take 4-5 5-6

The optimizer's state of blocks that take is begun anew. Tensors: w<l>-<r>, the weights of a block.
"""

from __future__ import annotations

from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.schedule.ops import Layout, Op, Row
from treeprop_ray.schedule.owner import owner_of

GROW = "grow"  # the pass of the first step along the chain


def auxiliary_edges(tree: Tree) -> list[Edge]:
    """The auxiliary blocks of the deepest path."""
    return [(l, r) for l, r in tree.path_edges(tree.spine_paths[-1])[:-1] if r - l > 1]


def weights_name(edge: Edge) -> str:
    """The tensor that holds a block's weights."""
    return f"w{edge[0]}-{edge[1]}"


def given_edge(op: Op) -> Edge:
    """The auxiliary block that an op is about."""
    l, _, r = (*op.reads, *op.writes)[0].removeprefix("w").partition("-")
    return int(l), int(r)


def growth_rows(tree: Tree, layout: Layout) -> list[Row]:
    """What goes before the first piece of the first step."""
    gives: dict[int, list[Op]] = {}
    takes: dict[int, list[Op]] = {}
    for l, r in auxiliary_edges(tree):
        name = weights_name((l, r))
        giver = layout.host_of[owner_of(tree, (l, r)).n]
        gives.setdefault(giver, []).append(Op("give", r, (), (name,)))
        for i in range(l, r):
            taker = layout.host_of[owner_of(tree, (i, i + 1)).n]
            takes.setdefault(taker, []).append(Op("take", i + 1, (name,)))
    return [(-2, GROW, 0, gives), (-1, GROW, 0, dict(sorted(takes.items())))]
