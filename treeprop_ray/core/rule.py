"""What a node must know to do its step: the objective's settings, and the piece of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeprop_ray.core.tree import Node, Tree

if TYPE_CHECKING:
    from torch import Tensor

    from treeprop_ray.config import Settings


@dataclass(frozen=True)
class Rule:
    """The settings that a node needs to do its step."""

    family: str = "gaussian"
    objective: str = "node"
    alpha: float = 1.0
    beta: float = 0.0
    correction: str = "mean"
    correction_scale: float = 1.0
    sigma: float = 0.0
    noise_schedule: str = "depth"
    mc_samples: int = 1
    target_gradient: bool = True
    detach_levels: bool = False
    own: float = 1.0
    right: float = 1.0
    ce: float = 1.0
    seed: int = 1
    labels_per_sample: int = 1
    recompute: bool = False  # activation checkpointing
    still: frozenset[int] = frozenset()  # states before which nothing trains (core/frozen.py)

    @classmethod
    def of(cls, settings: Settings, family: str, labels_per_sample: int = 1) -> Rule:
        """The part of the settings that is about the objective."""
        w = settings.weights
        names = (
            "objective", "alpha", "beta", "correction", "correction_scale", "sigma",
            "noise_schedule", "mc_samples", "target_gradient", "detach_levels", "seed", "recompute",
        )  # fmt: skip
        chosen = {name: getattr(settings, name) for name in names}
        return cls(
            family=family, own=w.own, right=w.right, ce=w.ce,
            labels_per_sample=labels_per_sample, **chosen,
        )  # fmt: skip

    @property
    def node_weight(self) -> tuple[float, float]:
        """Weights of own and right."""
        return (0.0, 0.0) if self.objective == "final_ce" else (self.own, self.right)

    def ce_weight(self, tree: Tree, node: Node) -> float:
        """Weight of the cross-entropy at a spine node; 0 elsewhere."""
        if not tree.is_spine(node):
            return 0.0
        return self.ce if node.is_leaf or self.objective == "node_all_ce" else 0.0

    def asks_head(self, tree: Tree, node: Node) -> bool:
        """Whether a spine node needs the head at all."""
        return tree.is_spine(node) and (self.beta > 0 or self.ce_weight(tree, node) > 0)

    def sends_left(self, node: Node, stem_trains: bool) -> bool:
        """Whether an adjoint for z_l leaves the node."""
        if node.l == 0:
            return stem_trains
        return not self.detach_levels and node.l not in self.still

    def sends_right(self, tree: Tree, node: Node) -> bool:
        """Whether an adjoint for z_r leaves the node: only if `right` pulls on z_r."""
        if node.r in self.still:
            return False
        return node.r < tree.N and self.target_gradient and not self.detach_levels


MOST_HELD_OUT = 1024  # batches of a probe


@dataclass(frozen=True)
class HeldOut:
    """A batch that the probe looks at, and which of its draws from q."""

    batch: int
    draw: int = 0

    @property
    def word(self) -> int:
        """What random draws depend on in place of a step; below 0, where no step is."""
        return -1 - self.batch - MOST_HELD_OUT * self.draw


@dataclass(frozen=True)
class Piece:
    """A piece of the batch of one step: its places, and how many places the whole batch has.

    Of a held-out batch `step` is what its draws depend on.
    """

    step: int
    index: int
    start: int
    stop: int
    total: int
    held: HeldOut | None = None

    @property
    def places(self) -> range:
        return range(self.start, self.stop)

    def share(self, rows: Tensor) -> float:
        """1 / (number of elements of a tensor like `rows` for the whole batch)."""
        return 1 / (rows[0].numel() * self.total)


def cut(step: int | HeldOut, total: int, pieces: int) -> list[Piece]:
    """Cut the places 0..total-1 of a step's batch, or a held-out one, into nearly equal runs."""
    bounds = [total * i // pieces for i in range(pieces + 1)]
    word, held = (step, None) if isinstance(step, int) else (step.word, step)
    return [Piece(word, i, bounds[i], bounds[i + 1], total, held) for i in range(pieces)]
