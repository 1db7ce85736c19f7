"""A copy of the head in an actor of its own: it answers some levels of the spine.

The weights come from the boundary at every step, the gradients go back there; so a copy has no
parts, no optimizer and no state.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from treeprop_ray.core import devices
from treeprop_ray.core.boundary import Boundary, Labels
from treeprop_ray.core.head_sums import as_bytes, from_bytes, parameters_of
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Held, Share, there
from treeprop_ray.hosts.probe import HostProbe
from treeprop_ray.hosts.tree import TreeHost
from treeprop_ray.schedule.ops import Op


class HeadCopy(TreeHost):
    """The head and the labels of the pieces under way."""

    def __init__(self, share: Share, tree: Tree, rule: Rule) -> None:
        """`share`: that of the boundary, without batches."""
        stem, head = (
            share.parts[edge_name(edge)].to(devices.gpus.device(share.device)).train()
            for edge in (STEM, tree.head)
        )
        if any(True for _ in head.buffers()):
            raise UserError("head_copies: the head has buffers, which copies would not share")
        super().__init__(replace(share, parts={}), tree, rule, (), stem_trains=False)
        self.copied = parameters_of(head, stem)  # a head may use the stem's weights
        self.boundary = Boundary(tree, stem, head, rule, self.run_block, self.scale)
        self.losses.update(self.boundary.losses)
        self.own_verbs = {"head_copy": self._head_copy}
        self.verbs = dict(self.own_verbs)

    def probe(self, part: str) -> HostProbe | None:
        """As elsewhere; the copy is no part, so it is told here not to drop anything."""
        self.train(part == "end")
        return super().probe(part)

    def forget(self) -> None:
        """Drop everything of a step, or a probe, that was under way."""
        super().forget()
        self.train(True)

    def train(self, on: bool) -> None:
        """Whether dropout is on."""
        if self.boundary and self.boundary.head:
            self.boundary.head.train(on)

    @torch.no_grad()
    def _take_up(self, weights: torch.Tensor) -> None:
        for p, value in zip(self.copied, from_bytes(weights, self.copied), strict=True):
            if value is not None:
                p.copy_(value)

    def _head_copy(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.boundary is not None
        if (weights := held.pop("hw", None)) is not None:
            self._take_up(weights)
        self.boundary.labels[piece.index] = Labels(there(held, "y"), float(there(held, "k")))
        self._head(op, held, piece)
        if f"h{op.n}" in op.writes:
            held[f"h{op.n}"] = as_bytes([p.grad for p in self.copied])
        for p in self.copied:
            p.grad = None
