"""Who owns a block. Pure Python, no torch, no Ray."""

from __future__ import annotations

from treeprop_ray.core.tree import Edge, Node, Tree


def owner_of(tree: Tree, edge: Edge) -> Node:
    """The node that owns an edge that does not end at N: one of its two ends."""
    l, r = edge
    return tree.nodes[r] if tree.nodes[r].l == l else tree.nodes[l]
