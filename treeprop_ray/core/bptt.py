"""Backpropagation through time: the baseline on the same cell, unrolled or inside torch.nn.GRU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray.core.cells import Cell, GRUCell, share_with_torch_gru
from treeprop_ray.core.factor import full
from treeprop_ray.core.mingru import MinGRUCell

Roll = Callable[[Tensor], Tensor]  # x (B, N, S) -> h_N (B, H)
Autocast = Callable[[], contextlib.AbstractContextManager[object]]


def unrolled(cell: Cell) -> Roll:
    """h_t = f_0(h_{t-1}, x_t), one call per step; all symbols are projected in one product."""

    def roll(x_BNS: Tensor) -> Tensor:
        h = x_BNS.new_zeros(len(x_BNS), cell.hidden)
        for p in cell.project(x_BNS.transpose(0, 1)).unbind(0):
            h = cell.advance(p, h)
        return h

    return roll


def scanned(cell: MinGRUCell) -> Roll:
    """A cell that is linear in its state, over all steps at once."""
    return cell.last


def cell_by_cell(cell: nn.Module) -> Roll:
    """The textbook loop: the whole cell at every step, input product included."""

    def roll(x_BNS: Tensor) -> Tensor:
        h = x_BNS.new_zeros(len(x_BNS), cell.hidden)  # type: ignore[call-overload]
        for x_BS in x_BNS.unbind(1):
            h = cell(x_BS, h)
        return h

    return roll


def fused(cell: GRUCell) -> Roll:
    """The same network inside torch.nn.GRU, on the same parameters."""
    gru = share_with_torch_gru(cell)

    def roll(x_BNS: Tensor) -> Tensor:
        last: Tensor = gru(x_BNS.transpose(0, 1))[1]
        return last[0]

    return roll


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Denormal numbers are zero: vanishing gradients end there, and slow a CPU down tenfold."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class BPTT:
    """One forward, one cross-entropy at the end of the sequence, one backward."""

    def __init__(self, roll: Roll, readout: nn.Module, autocast: Autocast) -> None:
        self.roll, self.readout, self.autocast = roll, readout, autocast

    def gradients(self, x_BNS: Tensor, y: Tensor, batch: int) -> Tensor:
        """Add the gradients of a piece of the batch; its share of the mean cross-entropy."""
        with flushed():
            with self.autocast():
                logits = self.readout(self.roll(x_BNS))
            loss = F.cross_entropy(full(logits), y, reduction="sum") / batch
            loss.backward()
        return loss.detach()
