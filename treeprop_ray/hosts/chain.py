"""Backpropagation through the same blocks: a host that owns a run of consecutive chain blocks.

One stage that owns the whole chain is plain backpropagation; several are a pipeline (GPipe).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treeprop_ray.core.network import STEM
from treeprop_ray.core.node import Losses, at_once
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rng import derive
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.hosts.tree import Batch, Held, Host
from treeprop_ray.schedule.ops import Op


class ChainHost(Host):
    """Stage k of a chain: its blocks in order, and the head if it is the last stage."""

    def __init__(
        self,
        tree: Tree,
        rule: Rule,
        optimizer: OptimizerRule,
        parts: Mapping[Edge, nn.Module],
        blocks: Sequence[Edge],
        batch: Batch | None,
        stem_trains: bool,
        device: str = "cpu",
        precision: str = "float32",
    ) -> None:
        super().__init__(tree, rule, optimizer, parts, [], batch, stem_trains, device, precision)
        self.blocks = [edge for edge in blocks if edge != tree.head]
        self.stem_trains = stem_trains
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}  # piece -> (input, output)
        self.ce = Losses()

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.graphs.clear()

    def owned_losses(self) -> list[tuple[int, Losses]]:
        """The cross-entropy counts as the loss of state N."""
        return [(self.tree.N, self.ce)]

    def _do(self, op: Op, held: Held, piece: Piece) -> None:
        if op.verb == "open":
            assert self.boundary is not None
            x, y = self._places(piece)
            held["y"], held["z0"] = y, self.boundary.open(x, y, piece)
        elif op.verb == "ahead":
            held[op.writes[0]] = self._ahead(held[op.reads[0]], piece)
        elif op.verb == "head":
            held[op.writes[0]] = self._head(held[op.reads[0]], held["y"], piece)
        elif op.verb == "back":
            held[op.writes[0]] = self._return(held[op.reads[0]], piece)
        else:
            assert self.boundary is not None
            self.boundary.close(held[op.reads[0]], piece)

    def _ahead(self, z: Tensor | None, piece: Piece) -> Tensor:
        assert z is not None
        first = self.boundary is not None
        z_in = z.detach().requires_grad_(self.stem_trains or not first)
        z = z_in
        for edge in self.blocks:
            z = self.run_block(edge, z, piece)
        self.graphs[piece.index] = (z_in, z)
        return z.detach()

    def run_block(
        self, edge: Edge, z: Tensor, piece: Piece, block: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run a part (or `block` in its place) with its own seed.

        With `rule.recompute` only the input is kept for the backward pass, which runs the part
        again; random draws are repeated.
        """
        block = block or self.parts[edge]
        if self.rule.recompute:
            block = partial(checkpoint, block, use_reentrant=False)
        return self._run(block, z, self._seed(edge, piece))

    def _head(self, z: Tensor | None, y: Tensor | None, piece: Piece) -> Tensor:
        """Loss and backward of the head; returns the adjoint of its input."""
        assert z is not None and y is not None
        leaf = z.detach().requires_grad_()
        loss_of = partial(head_loss, self.parts[self.tree.head], labels=y, piece=piece)
        loss = self.run_block(self.tree.head, leaf, piece, loss_of)
        loss.backward()
        self.ce.add("ce", loss)
        assert leaf.grad is not None
        return leaf.grad

    def _return(self, adjoint: Tensor | None, piece: Piece) -> Tensor | None:
        z_in, z_out = self.graphs.pop(piece.index)
        assert adjoint is not None
        if z_out.requires_grad and z_out is not z_in:
            if self.rule.recompute:  # two steps would run the blocks again twice
                at_once(z_out, adjoint, z_in)
            else:
                self._back(z_out, adjoint, z_in)
            return z_in.grad
        return adjoint  # a stage that holds only the head

    def _seed(self, edge: Edge, piece: Piece) -> int:
        if edge == STEM:  # as `Boundary.open` has it
            return derive(self.rule.seed, "block", piece.step, 0, "stem", piece.index)
        return derive(self.rule.seed, "chain", piece.step, *edge, piece.index)
