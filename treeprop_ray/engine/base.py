"""What every engine offers to `train`; and scoring paths, the same for all engines in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treeprop_ray.host import StepReport
from treeprop_ray.tree import Edge, Tree

State = tuple[dict[str, Tensor], dict[str, Tensor]]  # (weights, optimizer), keyed by edge


@dataclass(frozen=True)
class Score:
    """A path on a split: mean cross-entropy and share of correct labels."""

    loss: float
    accuracy: float


class Engine(Protocol):
    """Trains one network. Steps are numbered from 0 over the whole run."""

    tree: Tree

    def step(self, step: int, report: bool) -> None:
        """Do (or submit) one training step; with `report` gradient norms are taken too."""

    def reports(self) -> list[StepReport]:
        """The reports of the hosts for the last step (waits for it)."""

    def score(self, paths: Mapping[str, Sequence[int]], split: str) -> dict[str, Score]:
        """Score paths on a split."""

    def clean_loss(self, path: Sequence[int], step: int) -> float:
        """Cross-entropy of a path on the training batch of `step`, without noise or labels."""

    def state(self) -> State:
        """Weights and optimizer state after the last step, keyed by edge."""

    def load(self, state: State) -> None:
        """Take up a state."""

    def close(self) -> None:
        """Give back everything that was started."""


def score_paths(
    tree: Tree,
    paths: Mapping[str, Sequence[int]],
    batches: Iterable[tuple[Tensor, Tensor]],
    through: Callable[[Edge, Tensor], Tensor],
    score: Callable[[Tensor, Tensor], tuple[float, int, int]],
    stem: Edge,
) -> dict[str, Score]:
    """Send every batch along every path; states of shared beginnings are computed once."""
    sums = {name: [0.0, 0, 0] for name in paths}
    edges = {name: tree.path_edges(path)[:-1] for name, path in paths.items()}
    for x, y in batches:
        states: dict[tuple[Edge, ...], Tensor] = {(): through(stem, x)}
        for name, along in edges.items():
            for k in range(1, len(along) + 1):
                key = tuple(along[:k])
                if key not in states:
                    states[key] = through(along[k - 1], states[key[:-1]])
            for i, value in enumerate(score(states[tuple(along)], y)):
                sums[name][i] += value
    return {name: Score(loss / n, right / n) for name, (loss, right, n) in sums.items()}
