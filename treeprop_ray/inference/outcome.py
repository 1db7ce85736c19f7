"""What all paths say about all samples of a split, and what leaving early makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from treeprop_ray.core.factor import full
from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.core.scoring import path_states
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.inference.early_exit import Exit, answer_at, confidence_of
from treeprop_ray.inference.paths import network_through


@dataclass(frozen=True)
class Views:
    """Logits (paths, samples, classes) and labels (samples) of a split."""

    paths: Mapping[str, Sequence[int]]
    logits: Tensor
    y: Tensor

    def answers(self, exits: Sequence[Exit]) -> tuple[Tensor, Tensor]:
        """Confidence and whether it is right, for every exit and sample."""
        names = list(self.paths)
        logits = [self.logits[names.index(e.name)] for e in exits]
        confidence, correct = [], []
        for k in range(1, len(exits) + 1):
            sure, label = confidence_of(answer_at(exits[:k], logits[:k]))
            confidence.append(sure)
            correct.append(label == self.y)
        return torch.stack(confidence), torch.stack(correct)


class Outcome(NamedTuple):
    """Share of correct samples, mean blocks run, share of samples that leave at each exit."""

    accuracy: float
    blocks: float
    left_at: tuple[float, ...]


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
    network: TreeNetwork,
    paths: Mapping[str, Sequence[int]],
    batches: Iterable[tuple[Tensor, Tensor]],
    ignore_index: int = -100,
) -> Views:
    """Ask every path about every sample, once. Labels with `ignore_index` are left out."""
    tree, through = network.tree, network_through(network)
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    for x, y in batches:
        states = path_states(tree, paths, x, through)
        said = torch.stack([full(through(tree.head, z)).flatten(0, -2) for z in states.values()])
        keep = y.flatten() != ignore_index
        logits.append(said[:, keep].cpu())
        labels.append(y.flatten()[keep].cpu())
    return Views(paths, torch.cat(logits, 1), torch.cat(labels))


def outcome(
    confidence: Tensor, correct: Tensor, blocks: Sequence[int], thresholds: Sequence[float]
) -> Outcome:
    """Every sample leaves at its first exit with confidence >= threshold, at last at the end."""
    leaves = confidence >= torch.tensor(thresholds, dtype=torch.double)[:, None]
    leaves[-1] = True
    first = leaves.int().argmax(0)  # the first exit that is True
    right = correct.gather(0, first[None])[0]
    left_at = torch.bincount(first, minlength=len(blocks)).tolist()
    n = len(first)
    return Outcome(
        int(right.sum()) / n,
        sum(count * b for count, b in zip(left_at, blocks, strict=True)) / n,
        tuple(count / n for count in left_at),
    )
