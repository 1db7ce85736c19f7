"""Frozen parts: which ones are meant, and which states then stay as they are. No torch here.

A state is still when nothing that trains comes before it; no adjoint is sent to it:

    stem   0-1   1-2   2-3   3-4         freeze=[stem,0..2]
     z_0 ── z_1 ── z_2 ── z_3 ── z_4     still: 0, 1, 2; z_3 is the first that moves
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Sequence

from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError


def frozen_parts(freeze: Sequence[str], names: Sequence[str], tree: Tree) -> frozenset[str]:
    """The parts among `names` that `freeze` means; a word that means none is an error."""
    chosen: set[str] = set()
    for word in freeze:
        chosen |= {name for name in names if _means(word, name, tree)} or _nothing(word, names)
    return frozenset(chosen)


def _means(word: str, name: str, tree: Tree) -> bool:
    if between := re.fullmatch(r"(\d+)\.\.(\d+)", word):
        first, last = map(int, between.groups())
        return name in {f"{i}-{i + 1}" for i in range(first, min(last, tree.N))}
    if word == "head":
        return name == f"{tree.head[0]}-{tree.head[1]}"
    return fnmatch.fnmatchcase(name, word)


def _nothing(word: str, names: Sequence[str]) -> set[str]:
    shown = list(names) if len(names) <= 20 else [*names[:17], "…", *names[-2:]]
    raise UserError(
        f"freeze=[{word}]: means no part; parts are {', '.join(shown)}; head is the last, 0..3 the "
        "chain's blocks between the states 0 and 3"
    )


def still_in_tree(tree: Tree, trained: Collection[str]) -> frozenset[int]:
    """States of a tree that depend on no trained part: z_n comes from z_l by the left block."""
    still = set() if "stem" in trained else {0}
    for node in sorted(tree.nodes.values(), key=lambda node: node.level):
        if node.l in still and f"{node.left[0]}-{node.left[1]}" not in trained:
            still.add(node.n)
    return frozenset(still)


def still_in_chain(tree: Tree, trained: Collection[str]) -> frozenset[int]:
    """States of the chain that depend on no trained part."""
    still = set() if "stem" in trained else {0}
    for i in range(1, tree.N):
        if i - 1 in still and f"{i - 1}-{i}" not in trained:
            still.add(i)
    return frozenset(still)
