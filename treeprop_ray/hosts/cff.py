"""Contrastive forward-forward with margin (CFF+M): every layer learns from a loss of its own.

Stage 1, steps before `first`: two views of every image; layer l gets the detached output of layer
l - 1, has its contrastive loss (core/contrast.py) and its own AdamW. The stem learns with layer 1.
At the end of each epoch the last layer's loss on the validation split is taken; the weights of the
lowest are kept. Stage 2: these weights, frozen, and one view; the head learns by cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from treeprop_ray.config import Cff
from treeprop_ray.core.contrast import contrastive_loss, margin_at
from treeprop_ray.core.network import STEM, edge_name, part_state
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.rng import derive
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.hosts.base import Held, Share, State, there
from treeprop_ray.hosts.blocks import BlockHost
from treeprop_ray.schedule.ops import Call, Op

KEPT = "/kept"  # ends the names of kept weights among the optimizer's slots
BEST = "cff/validation/kept"  # the loss that they had


class CffHost(BlockHost):
    """A run of consecutive layers, with the stem if it has the first and the head if the last."""

    def __init__(
        self, share: Share, tree: Tree, rule: Rule, blocks: Sequence[Edge], cff: Cff
    ) -> None:
        self.kept: dict[str, Tensor] = {}
        self.best = math.inf  # the host that opens the batches knows the lowest validation loss
        super().__init__(share, tree, rule)
        assert share.optimizer.second is not None
        self.first, self.tau = share.optimizer.second[0], cff.tau
        self.outs: dict[int, Tensor] = {}  # layer -> its output with its graph
        self.margin = {
            r: margin_at(r - 1, tree.N - 1, cff.margin, cff.m_first, cff.m_last)
            for r in range(1, tree.N)
        }
        self.verbs = {
            "open": self._open, "ahead": self._ahead, "learn": self._learn,
            "classify": self._classify,
        }  # fmt: skip

    def where(self, place: int) -> str:
        """Layer, or the head."""
        if place == 0:
            return ""
        return "the head" if place == self.tree.N else f"layer {place}"

    def part_at(self, part: str, value: float) -> str:
        """The block."""
        return f"block {part} is {value}"

    def run(self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Do a call; the first one of stage 2 puts the kept weights in place."""
        if piece.step >= self.first and self.kept:
            for name, module in self._layers():
                module.load_state_dict(part_state(self.kept, name))
            self.kept = {}
        return super().run(call, piece, inputs)

    # -- verbs: layers learn in stage 1, the head in stage 2 ----------------------------------

    def _open(self, op: Op, held: Held, piece: Piece) -> None:
        """Augmentations of the step's images one after another, and the labels of all rows."""
        assert self.batches is not None
        views = range(2 if self._layers_learn(piece) else 1)
        pairs = [self.batches(piece.step, view) for view in views]
        x, y = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        held["z0"], held["y"] = x.to(self.device), y.to(self.device)

    def _ahead(self, op: Op, held: Held, piece: Piece) -> None:
        """Layer n on its detached input; the stem is a part of layer 1."""
        edge, z = (op.n - 1, op.n), there(held, op.reads[0])
        if not self._layers_learn(piece):
            z = self.through(STEM, z) if op.n == 1 else z
            held[op.writes[0]] = self.through(edge, z)
            return
        z = z.detach()
        if op.n == 1:
            z = self.run_block(self.parts[edge_name(STEM)], z, self._seed(STEM, piece))
        self.outs[op.n] = self.run_block(self.parts[edge_name(edge)], z, self._seed(edge, piece))
        held[op.writes[0]] = self.outs[op.n].detach()

    def _learn(self, op: Op, held: Held, piece: Piece) -> None:
        if not self._layers_learn(piece):
            return
        out, labels = self.outs.pop(op.n), there(held, "y")
        loss, clamped = contrastive_loss(out, labels, self.margin[op.n], self.tau)
        if loss.requires_grad:  # a frozen layer only tells its loss
            loss.backward(torch.full_like(loss, self.scale()))
        self.note(op.n, "contrast", loss)
        self.note(op.n, "clamped", clamped)

    def _classify(self, op: Op, held: Held, piece: Piece) -> None:
        if self._layers_learn(piece):
            return
        z, head = there(held, op.reads[0]).detach(), self.tree.head
        labels = there(held, "y")
        loss_of = partial(head_loss, self.parts[edge_name(head)], labels=labels, piece=piece)
        loss = self.run_block(loss_of, z, self._seed(head, piece))
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, self.scale()))
        self.note(self.tree.N, "ce", loss)

    def _layers_learn(self, piece: Piece) -> bool:
        return piece.step < self.first

    def _seed(self, edge: Edge, piece: Piece) -> int:
        return derive(self.rule.seed, "cff", piece.step, *edge)

    # -- which weights stage 2 gets -----------------------------------------------------------

    @torch.no_grad()
    def validation_loss(self, z: Tensor, y: Tensor) -> float:
        """The last layer's loss on what it gave for a validation batch."""
        loss, _ = contrastive_loss(z, y.to(z.device), self.margin[self.tree.N - 1], self.tau)
        return float(loss)

    def judge(self, loss: float) -> bool:
        """Whether this is the lowest validation loss so far."""
        better = loss < self.best
        self.best = min(loss, self.best)
        return better

    def keep(self) -> None:
        """Remember the layers' weights."""
        self.kept = {
            f"{name}/{key}": value.detach().clone()
            for name, module in self._layers()
            for key, value in module.state_dict().items()
        }

    def _layers(self) -> list[tuple[str, nn.Module]]:
        head = edge_name(self.tree.head)
        return [(name, module) for name, module in self.parts.items() if name != head]

    def state(self) -> State:
        """Kept weights are stored beside the optimizer's slots, by the same keys."""
        weights, optimizer = super().state()
        optimizer.update({key + KEPT: value.cpu() for key, value in self.kept.items()})
        if self.best < math.inf:
            optimizer[BEST] = torch.tensor(self.best, dtype=torch.float64)
        return weights, optimizer

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Take the own parts out of a full or partial state."""
        mine = {name for name, _ in self._layers()}
        self.kept = {
            key.removesuffix(KEPT): value.clone().to(self.device)
            for key, value in optimizer.items()
            if key.endswith(KEPT) and key.split("/")[0] in mine
        }
        if self.batches is not None:
            self.best = float(optimizer[BEST]) if BEST in optimizer else math.inf
        slots = {key: value for key, value in optimizer.items() if not key.endswith(KEPT)}
        super().load(weights, slots)

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.outs.clear()
