"""What every engine offers to `train`, and how paths are scored in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray.core.factor import full
from treeprop_ray.core.network import STEM, TreeNetwork
from treeprop_ray.core.tree import Edge, Tree

if TYPE_CHECKING:
    from treeprop_ray.models.rnn import TimeNetwork

State = tuple[dict[str, Tensor], dict[str, Tensor]]  # (weights, optimizer), keyed by edge
Through = Callable[[Edge, Tensor], Tensor]  # runs the block of an edge, the stem or the head


@dataclass(frozen=True)
class Score:
    """A path on a split: mean cross-entropy and share of correct labels."""

    loss: float
    accuracy: float


@dataclass
class StepReport:
    """What a host tells about a step: unweighted loss terms by place, squared norms by part, and
    the seconds it has spent so far, over all steps, on getting training batches."""

    losses: dict[int, dict[str, float]] = field(default_factory=dict)
    square_norms: dict[str, float] = field(default_factory=dict)
    data_seconds: float = 0.0


@dataclass(frozen=True)
class Span:
    """When an actor ran a call, for the timeline."""

    actor: str
    phase: str
    level: int
    piece: int
    step: int
    begin: float  # seconds since the epoch
    end: float


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

    def load(self, state: State, step: int = 0) -> None:
        """Take up a state that an earlier run had before `step`."""

    def spans(self) -> list[Span]:
        """When the actors worked during the last steps; empty in one process."""

    def close(self) -> None:
        """Give back everything that was started."""


def path_states(
    tree: Tree, paths: Mapping[str, Sequence[int]], x: Tensor, through: Through
) -> dict[str, Tensor]:
    """What every path hands to the head for a batch; shared beginnings are computed once."""
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


def score_paths(
    tree: Tree,
    paths: Mapping[str, Sequence[int]],
    batches: Iterable[tuple[Tensor, Tensor]],
    through: Through,
    score: Callable[[Tensor, Tensor], tuple[float, int, int]],
) -> dict[str, Score]:
    """Send every batch along every path."""
    sums = {name: [0.0, 0, 0] for name in paths}
    for x, y in batches:
        for name, state in path_states(tree, paths, x, through).items():
            for i, value in enumerate(score(state, y)):
                sums[name][i] += value
    return {name: Score(loss / n, right / n) for name, (loss, right, n) in sums.items()}


def network_through(network: TreeNetwork) -> Through:
    """Runs the blocks of a network in this process, in evaluation mode."""
    parts = network.eval().parts()

    @torch.no_grad()
    def through(edge: Edge, z: Tensor) -> Tensor:
        with torch.autocast(z.device.type, torch.bfloat16, enabled=network.bf16):
            out: Tensor = parts[edge](z)
        return out

    return through


def score_network(
    network: TreeNetwork | TimeNetwork,
    paths: Mapping[str, Sequence[int]],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> dict[str, Score]:
    """Score paths of a network in this process."""
    if not isinstance(network, TreeNetwork):
        return network.eval().score(paths, batches)
    through = network_through(network)

    def score(z: Tensor, y: Tensor) -> tuple[float, int, int]:
        with torch.autocast(z.device.type, torch.bfloat16, enabled=network.bf16):
            return count(network.block(network.tree.head), z, y)

    return score_paths(network.tree, paths, batches, through, score)


@torch.no_grad()
def count(head: nn.Module, z: Tensor, y: Tensor) -> tuple[float, int, int]:
    """Summed cross-entropy, number of correct labels, number of labels at the head.

    A head may bring its own `count(state, labels)` (in chunks over a large vocabulary).
    """
    if hasattr(head, "count"):
        found: tuple[float, int, int] = head.count(z, y.to(z.device))  # type: ignore[operator]
        return found
    logits = full(head(z)).flatten(0, -2)
    y = y.to(logits.device).flatten()
    loss = F.cross_entropy(logits, y, reduction="sum")
    return float(loss), int((logits.argmax(-1) == y).sum()), y.numel()
