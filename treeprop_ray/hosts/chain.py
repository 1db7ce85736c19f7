"""Backpropagation through the same blocks: a host that owns a run of consecutive chain blocks.

One stage that owns the whole chain is plain backpropagation; several are a pipeline (GPipe).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.node import Boundary, at_once
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.rng import derive
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.hosts.base import Held, Share, there
from treeprop_ray.hosts.blocks import BlockHost
from treeprop_ray.schedule.ops import Op


class ChainHost(BlockHost):
    """Stage k of a chain: its blocks in order, and the head if it is the last stage."""

    def __init__(
        self, share: Share, tree: Tree, rule: Rule, blocks: Sequence[Edge], stem_trains: bool
    ) -> None:
        super().__init__(share, tree, rule)
        self.blocks = [edge for edge in blocks if edge != tree.head]
        first = blocks[0][0] if blocks else 0
        self.input_moves = stem_trains if first == 0 else first not in rule.still
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}  # piece -> (input, output)
        self.boundary: Boundary | None = None
        if share.batches is not None:  # the head may be in another stage
            stem = self.parts[edge_name(STEM)]
            self.boundary = Boundary(tree, stem, None, rule, self.run_block)
        self.verbs = {
            "open": self._open, "ahead": self._ahead, "head": self._head, "back": self._back,
            "close": self._close,
        }  # fmt: skip

    def where(self, place: int) -> str:
        """The only loss is the head's."""
        return "the head, level 0" if place == self.tree.N else ""

    def part_at(self, part: str, value: float) -> str:
        """The block; a chain has no levels."""
        return f"block {part} is {value} at the boundary, level 0"

    def end_piece(self, piece: Piece) -> None:
        """The labels of the piece are not needed any more."""
        if self.boundary:
            self.boundary.labels.pop(piece.index, None)

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.graphs.clear()
        if self.boundary:
            self.boundary.z_0.clear()
            self.boundary.labels.clear()

    def run_part(
        self, edge: Edge, z: Tensor, piece: Piece, block: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run a part (or `block` in its place) with its own seed.

        With `rule.recompute` only the input is kept for the backward pass, which runs the part
        again; random draws are repeated.
        """
        block = block or self.parts[edge_name(edge)]
        if self.rule.recompute:
            block = partial(checkpoint, block, use_reentrant=False)
        return self.run_block(block, z, self._seed(edge, piece))

    # -- verbs --------------------------------------------------------------------------------

    def _open(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        x, y = self.places(piece)
        held["y"], held["z0"] = y, self.boundary.open(x, y, piece)

    def _ahead(self, op: Op, held: Held, piece: Piece) -> None:
        z_in = there(held, op.reads[0]).detach().requires_grad_(self.input_moves)
        z = z_in
        for edge in self.blocks:
            z = self.run_part(edge, z, piece)
        self.graphs[piece.index] = (z_in, z)
        held[op.writes[0]] = z.detach()

    def _head(self, op: Op, held: Held, piece: Piece) -> None:
        """Loss and backward of the head; writes the adjoint of its input."""
        leaf, head = there(held, op.reads[0]).detach().requires_grad_(), self.tree.head
        labels = there(held, "y")
        loss_of = partial(head_loss, self.parts[edge_name(head)], labels=labels, piece=piece)
        loss = self.run_part(head, leaf, piece, loss_of)
        loss.backward(torch.full_like(loss, self.scale()))
        self.note(self.tree.N, "ce", loss)
        held[op.writes[0]] = leaf.grad

    def _back(self, op: Op, held: Held, piece: Piece) -> None:
        z_in, z_out = self.graphs.pop(piece.index)
        adjoint = held[op.reads[0]]
        if z_out is z_in:  # a stage that holds only the head
            held[op.writes[0]] = adjoint
            return
        if adjoint is None or not z_out.requires_grad:  # nothing up to here trains
            held[op.writes[0]] = None
            return
        if self.rule.recompute:  # two steps would run the blocks again twice
            at_once(z_out, adjoint, z_in)
        else:
            self.go_back(z_out, adjoint, z_in)
        held[op.writes[0]] = z_in.grad

    def _close(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        self.boundary.close(held[op.reads[0]], piece)

    def _seed(self, edge: Edge, piece: Piece) -> int:
        if edge == STEM:  # as `Boundary.open` has it
            return derive(self.rule.seed, "block", piece.step, 0, "stem", piece.index)
        return derive(self.rule.seed, "chain", piece.step, *edge, piece.index)
