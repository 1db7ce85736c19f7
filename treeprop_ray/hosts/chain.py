"""Backpropagation through the same blocks: a host that owns a run of consecutive chain blocks.

One stage that owns the whole chain is plain backpropagation; several are a pipeline (GPipe).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treeprop_ray.core.boundary import Boundary
from treeprop_ray.core.network import STEM, edge_name
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

    # -- verbs --------------------------------------------------------------------------------

    def _open(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        x, y = self.places(piece)
        held["y"], held["z0"] = y, self.boundary.open(x, y, piece, self.counted())
        held["k"] = torch.tensor(float(self.counted() or 1), device=self.device)

    def _ahead(self, op: Op, held: Held, piece: Piece) -> None:
        z_in = there(held, op.reads[0]).detach().requires_grad_(self.input_moves)
        z = z_in
        for edge in self.blocks:
            z = self.run_part(edge, z, piece)
        self.graphs[piece.index] = (z_in, z)
        held[op.writes[0]] = z.detach()

    def _head(self, op: Op, held: Held, piece: Piece) -> None:
        z, y, labels = (there(held, name) for name in (op.reads[0], "y", "k"))
        held[op.writes[0]] = self.end_chain(z, y, labels, piece)

    def _back(self, op: Op, held: Held, piece: Piece) -> None:
        z_in, z_out = self.graphs.pop(piece.index)
        adjoint = held[op.reads[0]]
        if z_out is z_in:  # a stage that holds only the head
            held[op.writes[0]] = adjoint
            return
        held[op.writes[0]] = self.back_through(z_in, z_out, adjoint)

    def _close(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        self.boundary.close(held[op.reads[0]], piece)
