"""What a node must know to do its step: the objective's settings, and the piece of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from treeprop_ray.config.names import dotted
from treeprop_ray.core.tree import Node, Tree

if TYPE_CHECKING:
    from torch import Tensor

    from treeprop_ray.config import Settings


JUDGING = ("cross_entropy", "bce")  # losses whose labels are right or wrong


@dataclass(frozen=True)
class LossRule:
    """The loss at the head (core/loss.py)."""

    name: str = "cross_entropy"
    label_smoothing: float = 0.0
    ignore_index: int = -100
    class_weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> LossRule:
        """The settings loss.*"""
        s = settings.loss
        return cls(s.name, s.label_smoothing, s.ignore_index, tuple(s.class_weights))

    @property
    def own(self) -> bool:
        """A function of the user's own, package.module:function."""
        return dotted(self.name)

    @property
    def judges(self) -> bool:
        """Whether labels are right or wrong, so that there is an accuracy."""
        return self.name in JUDGING


@dataclass(frozen=True)
class Rule:
    """The settings that a node needs to do its step."""

    family: str = "gaussian"
    objective: str = "node"
    alpha: float = 1.0
    beta: float = 0.0
    correction: str = "mean"
    correction_scale: float = 1.0
    input: str = "mean"  # what a right block reads for its loss: mu_fwd, or the sample z_n
    ce_at: str = "mean"  # and the head
    reduction: str = "mean"
    bernoulli: str = "kl"
    levels: str = "all"
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
    loss: LossRule = LossRule()
    context: int = 0  # tensors that the stem gives to all blocks besides z_0

    @cached_property
    def side_inputs(self) -> tuple[str, ...]:
        """Their names in a schedule."""
        return tuple(f"c{i}" for i in range(self.context))

    @classmethod
    def of(cls, settings: Settings, family: str, labels_per_sample: int = 1) -> Rule:
        """The part of the settings that is about the objective."""
        w = settings.weights
        names = (
            "objective", "alpha", "beta", "correction", "correction_scale", "sigma",
            "noise_schedule", "mc_samples", "target_gradient", "detach_levels", "seed", "recompute",
            "input", "ce_at", "reduction", "bernoulli", "levels",
        )  # fmt: skip
        chosen = {name: getattr(settings, name) for name in names}
        return cls(
            family=family, own=w.own, right=w.right, ce=w.ce,
            labels_per_sample=labels_per_sample,
            loss=LossRule.of(settings),
            **chosen,
        )  # fmt: skip

    @cached_property
    def kind(self) -> str:
        """The family, as `factor` knows it: gaussian, bernoulli, or bce (bernoulli=literal)."""
        literal = self.family == "bernoulli" and self.bernoulli == "literal"
        return "bce" if literal else self.family

    @property
    def by_product(self) -> bool:
        """Whether the correction is made of the literal product J^T (z_r - z_r_hat)."""
        return self.correction in ("vjp", "clipped")

    @property
    def gain(self) -> float:
        """d(mu)/d(mu_fwd); the correction is a constant."""
        return 1.0 if self.kind == "bernoulli" else self.alpha

    @property
    def transition_sigma(self) -> float:
        """The noise of the model's own transitions: twice the variance of the finest factor (paper,
        node-wise losses). Without noise, 1: the KL is then half the squared error."""
        return math.sqrt(2) * self.sigma if self.sigma > 0 else 1.0

    def share(self, rows: Tensor, piece: Piece) -> float:
        """What a divergence, summed over the elements of a piece, is multiplied by.

        reduction=sigma: then it is the KL in nats for each label, less its constant.
        """
        if self.reduction == "mean":
            return piece.share(rows)
        per_label = 1 / (piece.total * self.labels_per_sample)
        if self.family == "bernoulli":
            return per_label
        return per_label / (2 * self.transition_sigma**2)

    def node_weight(self, node: Node) -> tuple[float, float]:
        """Weights of own and right; levels=finest: only where the block is one of the chain."""
        if self.objective == "final_ce":
            return 0.0, 0.0
        every = self.levels == "all"
        own = self.own if every or node.n - node.l == 1 else 0.0
        return own, self.right if every or node.r - node.n == 1 else 0.0

    def right_weight(self, tree: Tree, node: Node) -> float:
        """Weight of the right-hand loss: of `right`, on the spine of the cross-entropy."""
        return self.ce_weight(tree, node) if tree.is_spine(node) else self.node_weight(node)[1]

    def at_sample(self, tree: Tree, node: Node) -> bool:
        """Whether the right-hand loss of a node is at the sample z_n instead of mu_fwd."""
        switch = self.ce_at if tree.is_spine(node) else self.input
        return switch == "sample" and self.right_weight(tree, node) > 0

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
