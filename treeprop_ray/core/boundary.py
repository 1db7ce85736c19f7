"""Both ends of the chain beside the tree's nodes (node.py): stem, head and the labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from treeprop_ray.core.loss import counted
from treeprop_ray.core.node import Losses, Run, Scale, pull_back, unscaled
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.rng import derive, draws
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Tree


class Labels(NamedTuple):
    """The labels of a piece, and how many labels of the whole batch count."""

    y: Tensor
    counted: float


class Boundary:
    """Opens a batch, answers nodes of the spine, and closes."""

    def __init__(
        self,
        tree: Tree,
        stem: nn.Module,
        head: nn.Module | None,
        rule: Rule,
        run: Run,
        scale: Scale = unscaled,
    ) -> None:
        self.scale = scale
        self.tree, self.stem, self.head, self.rule, self.run = tree, stem, head, rule, run
        self.stem_trains = any(p.requires_grad for p in stem.parameters())
        self.stem_draws = draws(stem)
        self.z_0: dict[int, Tensor] = {}
        self.labels: dict[int, Labels] = {}
        self.losses: dict[int, Losses] = {node.n: Losses() for node in tree.spine}

    def open(self, x: Tensor, y: Tensor, piece: Piece, labels: float | None = None) -> Tensor:
        """z_0 = stem(x); keep the labels for the head. `labels`: how many of the whole batch count,
        if the piece is not all of it."""
        self.labels[piece.index] = Labels(
            y, counted(self.rule.loss, y) if labels is None else labels
        )
        words = (self.rule.seed, "block", piece.step, 0, "stem", piece.index)
        z_0 = self.run(self.stem, x, derive(*words) if self.stem_draws else None)
        if self.stem_trains:
            self.z_0[piece.index] = z_0
        return z_0.detach()

    def answer(self, n: int, state: Tensor, piece: Piece) -> Tensor:
        """Loss of head(mu_fwd), or head(z_n), and its backward, at once. Returns its gradient."""
        leaf, loss = self._asked(n, state, piece)
        self.losses[n].add("ce", loss)
        weight = self.rule.ce_weight(self.tree, self.tree.nodes[n])
        return pull_back(loss, torch.full_like(loss, self.scale()), leaf, weight)

    def hint(self, n: int, mu_fwd: Tensor, piece: Piece) -> Tensor:
        """d(loss)/d(mu_fwd) for the correction alone: the head learns nothing."""
        leaf, loss = self._asked(n, mu_fwd, piece)
        return pull_back(loss, torch.full_like(loss, self.scale()), leaf, 0)

    def _asked(self, n: int, state: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        leaf = state.detach().requires_grad_()
        seed = derive(self.rule.seed, "block", piece.step, n, "head", piece.index)
        assert self.head is not None
        return leaf, self.run(self.loss_of(self.head, piece), leaf, seed)

    def loss_of(self, head: nn.Module, piece: Piece) -> Callable[[Tensor], Tensor]:
        """The loss of a head on the labels of a piece, as a function of its state."""
        y, labels = self.labels[piece.index]
        return partial(head_loss, head, labels=y, piece=piece, rule=self.rule.loss, counted=labels)

    def close(self, adj_0: Tensor | None, piece: Piece) -> None:
        """Backward of the stem."""
        z_0 = self.z_0.pop(piece.index)
        if adj_0 is not None:
            z_0.backward(adj_0)
