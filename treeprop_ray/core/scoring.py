"""Scores of paths: sums over the labels of every batch. A head may bring its own `count`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray.core.factor import full
from treeprop_ray.core.network import STEM
from treeprop_ray.core.tree import Edge, Tree

Counts = tuple[float, int, int]  # summed cross-entropy, correct labels, labels
Through = Callable[[Edge, Tensor], Tensor]  # runs the block of an edge, the stem or the head


@dataclass(frozen=True)
class Score:
    """A path on a split: mean cross-entropy and share of correct labels."""

    loss: float
    accuracy: float

    @classmethod
    def of(cls, counts: Iterable[Counts]) -> Score:
        """From the counts of some batches, added up in their order."""
        loss, correct, labels = 0.0, 0, 0
        for batch in counts:
            loss, correct, labels = loss + batch[0], correct + batch[1], labels + batch[2]
        return cls(loss / labels, correct / labels)


@torch.no_grad()
def count(head: nn.Module, z: Tensor, y: Tensor) -> Counts:
    """Summed cross-entropy, number of correct labels, number of labels at the head.

    A head may bring its own `count(state, labels)` (in chunks over a large vocabulary).
    """
    if hasattr(head, "count"):
        counts: Counts = head.count(z, y.to(z.device))  # type: ignore[operator]
        return counts
    logits = full(head(z)).flatten(0, -2)
    y = y.to(logits.device).flatten()
    loss = F.cross_entropy(logits, y, reduction="sum")
    return float(loss), int((logits.argmax(-1) == y).sum()), y.numel()


def path_states(
    tree: Tree, paths: Mapping[str, Sequence[int]], x: Tensor, through: Through
) -> dict[str, Tensor]:
    """The state in front of the head on every path; beginnings that paths share run once."""
    states: dict[tuple[Edge, ...], Tensor] = {(): through(STEM, x)}
    out = {}
    for name, path in paths.items():
        along = tree.path_edges(path)[:-1]
        for k in range(1, len(along) + 1):
            key = tuple(along[:k])
            if key not in states:
                states[key] = through(along[k - 1], states[key[:-1]])
        out[name] = states[tuple(along)]
    return out
