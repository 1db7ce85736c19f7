"""What hosts of blocks share, whether in a tree or in a chain: a block or the head, evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core.loss import counted
from treeprop_ray.core.network import STEM, edge_name, edge_of
from treeprop_ray.core.node import at_once
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.rng import derive, draws
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.scoring import Counts, count
from treeprop_ray.core.states import (
    context_from,
    leaves_of,
    next_state,
    same_structure,
    split_stem,
)
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.data.batches import Which
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.again import run_again
from treeprop_ray.hosts.base import Held, Host, Share, there
from treeprop_ray.schedule.ops import Call


class BlockHost(Host):
    """Some blocks of a network, by edge."""

    def __init__(self, share: Share, tree: Tree, rule: Rule) -> None:
        self.tree, self.rule = tree, rule
        super().__init__(share)
        self.weighs_labels = bool(rule.loss.class_weights)
        self.spec = share.context
        self.at_hand: Held = {}  # tensors of the piece under way
        self.stem_here = self.parts.get(edge_name(STEM))
        ends = (STEM, tree.head)
        edges = {name: edge_of(name) for name in self.parts}
        self.quiet = {name for name, part in self.parts.items() if not draws(part)}
        self.blocks_here = {id(self.parts[k]) for k, edge in edges.items() if edge not in ends}

    # -- the context (core/states.py): made by the stem once per piece, read by every block --------

    def run(self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Do a call."""
        self.at_hand = self.held.setdefault(piece.index, {})
        return super().run(call, piece, inputs)

    def run_block(
        self,
        block: Callable[[Tensor], Tensor],
        z: Tensor,
        seed: int | None,
        recompute: nn.Module | None = None,
    ) -> Tensor:
        """Run a block with its context, or the stem, which makes it. `recompute`: the part of which
        only the input is kept for the backward pass, which runs it again; random draws and buffers
        are repeated."""
        block = self.with_context(block)
        if recompute is not None:
            block = partial(run_again, recompute, block)
        return super().run_block(block, z, seed)

    def with_context(self, block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A part as a function from state to state; other functions as they are."""
        if id(block) in self.blocks_here:
            leaves = [there(self.at_hand, name) for name in self.rule.side_inputs]
            return partial(next_state, block, context=context_from(leaves, self.spec))
        if block is self.stem_here:
            return partial(self._open_context, block, self.at_hand)
        return block

    def _open_context(self, stem: Callable[[Tensor], Any], at_hand: Held, x: Tensor) -> Tensor:
        z_0, context = split_stem(stem(x))
        same_structure(context, self.spec)
        at_hand.update(zip(self.rule.side_inputs, leaves_of(context), strict=True))
        return z_0

    # -- the chain (method=bp, and the end of a run of the tree) -----------------------------------

    def run_part(
        self, edge: Edge, z: Tensor, piece: Piece, block: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run a part (or `block` in its place) with its own seed."""
        part = self.parts[edge_name(edge)]
        again = part if self.rule.recompute else None
        seed = self._seed(edge, piece) if block or edge_name(edge) not in self.quiet else None
        return self.run_block(block or part, z, seed, again)

    def _seed(self, edge: Edge, piece: Piece) -> int:
        if edge == STEM:  # as `Boundary.open` has it
            return derive(self.rule.seed, "block", piece.step, 0, "stem", piece.index)
        return derive(self.rule.seed, "chain", piece.step, *edge, piece.index)

    def end_chain(
        self, z: Tensor, y: Tensor, labels: Tensor | float, piece: Piece
    ) -> Tensor | None:
        """Loss and backward of the head at the chain's end; the adjoint of its input. `labels`: how
        many of the whole batch count."""
        leaf, head = z.detach().requires_grad_(), self.tree.head
        loss_of = partial(
            head_loss,
            self.parts[edge_name(head)],
            labels=y,
            piece=piece,
            rule=self.rule.loss,
            counted=labels,
        )
        loss = self.run_part(head, leaf, piece, loss_of)
        loss.backward(torch.full_like(loss, self.scale()))
        self.note(self.tree.N, "ce", loss)
        return leaf.grad

    def back_through(self, z_in: Tensor, z_out: Tensor, adjoint: Tensor | None) -> Tensor | None:
        """Backward from a state of the chain to an earlier one."""
        if adjoint is None or not z_out.requires_grad:  # nothing up to here trains
            return None
        if self.rule.recompute:  # two steps would run the blocks again twice
            at_once(z_out, adjoint, z_in)
        else:
            self.go_back(z_out, adjoint, z_in)
        return z_in.grad

    def counted(self, copies: int = 1) -> float:
        """How many labels of the whole batch at hand count, in `copies` of it."""
        assert self.current is not None
        labels, mine, loss = self.current.labels, self.current.y, self.rule.loss
        if labels is not None:
            return copies * counted(loss, labels)
        if counted(loss, mine) != len(mine):  # then those of the other copies are not known
            raise UserError(
                f"loss.ignore_index={loss.ignore_index}: replicas={self.copy.of} needs to know how "
                "many labels count; use samples in memory, or replicas=1"
            )
        return self.current.total

    @torch.no_grad()
    def opened(self, which: Which) -> tuple[Tensor, ...]:
        """z_0, the labels and the context's tensors of a batch, for an evaluation."""
        assert self.batches is not None
        x, y = self.batches.get(which)
        z_0 = self.through(STEM, x)
        return z_0, y, *(there(self.at_hand, name) for name in self.rule.side_inputs)

    @torch.no_grad()
    def through(self, edge: Edge, z: Tensor, *context: Tensor) -> Tensor:
        """A block in evaluation mode: no noise, no dropout."""
        self.catch_up()
        module = self.parts[edge_name(edge)]
        module.eval()
        self.at_hand = {
            name: t.to(self.device) for name, t in zip(self.rule.side_inputs, context, strict=False)
        }
        with self.autocast():
            out = self.tried(lambda: self.with_context(module)(z.to(self.device)))
        module.train()
        return out

    def answers(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What the head gives, and the targets, for metrics elsewhere."""
        return self.through(self.tree.head, z).cpu(), y.cpu()

    @torch.no_grad()
    def score(self, z: Tensor, y: Tensor) -> Counts:
        """The counts of a batch at the head."""
        self.catch_up()
        head = self.parts[edge_name(self.tree.head)].eval()
        with self.autocast():
            counts = self.tried(lambda: count(head, z.to(self.device), y, self.rule.loss))
        head.train()
        return counts
