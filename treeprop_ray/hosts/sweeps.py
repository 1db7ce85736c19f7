"""Units of the chain that sweep at the same time (schedule/sweeps.py), for the hosts of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from treeprop_ray.core.rule import Piece
from treeprop_ray.hosts.base import Held, Verb, there
from treeprop_ray.hosts.blocks import BlockHost
from treeprop_ray.schedule.ops import Op
from treeprop_ray.schedule.sweeps import units_of


class Sweeps:
    """The verbs of a sweep; graphs of the units' last passes are kept until they go back."""

    def __init__(self, host: BlockHost, stem_trains: bool) -> None:
        self.host, self.stem_trains = host, stem_trains
        self.units = {unit.edges[-1][1]: unit.edges for unit in units_of(host.tree)}
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (piece, end of the unit)
        self.verbs: dict[str, Verb] = {
            "sweep": self._sweep, "trace": self._trace, "pull": self._pull,
            "retrace": self._retrace, "gathered": self._gathered,
        }  # fmt: skip

    def _through(self, op: Op, held: Held, piece: Piece) -> tuple[Tensor, Tensor]:
        """The unit's input, as far as it is known, and its output."""
        edges = self.units[op.n]
        sides = len(self.host.rule.side_inputs)
        z_in = summed(held, op.reads[: len(op.reads) - sides])
        z_in = z_in.detach().requires_grad_(edges[0][0] > 0 or self.stem_trains)
        z = z_in
        for edge in edges:
            z = self.host.run_part(edge, z, piece)
        return z_in, z

    def _sweep(self, op: Op, held: Held, piece: Piece) -> None:
        with torch.no_grad():
            z_in, z_out = self._through(op, held, piece)
            held[op.writes[0]] = z_out - z_in

    def _trace(self, op: Op, held: Held, piece: Piece) -> None:
        z_in, z_out = self._through(op, held, piece)
        self.graphs[piece.index, op.n] = (z_in, z_out)
        held[op.writes[0]] = (z_out - z_in).detach()

    def _pull(self, op: Op, held: Held, piece: Piece) -> None:
        z_in, z_out = self.graphs[piece.index, op.n]
        slope = summed(held, op.reads).to(z_out.dtype)
        (back,) = torch.autograd.grad(z_out, z_in, slope, retain_graph=True)
        held[op.writes[0]] = back - slope

    def _retrace(self, op: Op, held: Held, piece: Piece) -> None:
        z_in, z_out = self.graphs.pop((piece.index, op.n))
        slope = summed(held, op.reads).to(z_out.dtype)
        back = self.host.back_through(z_in, z_out, slope)
        held[op.writes[0]] = None if back is None else back - slope

    def _gathered(self, op: Op, held: Held, piece: Piece) -> None:
        held[op.writes[0]] = summed(held, op.reads)


def summed(held: Held, names: Sequence[str]) -> Tensor:
    """Tensors added up in the order of their names."""
    return reduce(torch.add, (there(held, name) for name in names))
