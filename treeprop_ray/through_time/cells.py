"""Recurrent cells as plain matrix products: the part that needs no state first, then the rest.

    p = cell.project(x)      all symbols at once, one product
    h = cell.advance(p, h)   one step (or one step of many nodes at once)

Shapes: x (…, inputs), p (…, gates * H), h (…, H).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Cell(Protocol):
    """What the time tree and BPTT need of a cell."""

    hidden: int

    def project(self, x: Tensor) -> Tensor:
        """The input's share of the pre-activations."""

    def advance(self, p: Tensor, h: Tensor) -> Tensor:
        """The next state."""


class GRUCell(nn.Module):
    """torch.nn.GRUCell's formulas, parameters and initialisation."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs, self.hidden = inputs, hidden
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden))
        self.bias_hh = nn.Parameter(torch.empty(3 * hidden))
        for p in self.parameters():
            nn.init.uniform_(p, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    def project(self, x: Tensor) -> Tensor:
        """The input's share of reset gate, update gate and candidate."""
        return F.linear(x, self.weight_ih, self.bias_ih)

    def advance(self, p: Tensor, h: Tensor) -> Tensor:
        """h' = (1 - z) * n + z * h."""
        sizes = [2 * self.hidden, self.hidden]
        # under autocast the products are bfloat16; states and gates stay in the state's type
        from_h = F.linear(h, self.weight_hh, self.bias_hh).to(h.dtype)
        p_gates, p_new = p.to(h.dtype).split(sizes, -1)
        h_gates, h_new = from_h.split(sizes, -1)
        r, z = torch.sigmoid(p_gates + h_gates).chunk(2, -1)
        n = torch.tanh(torch.addcmul(p_new, r, h_new))
        return torch.lerp(n, h, z)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step."""
        return self.advance(self.project(x), h)


class ElmanCell(nn.Module):
    """Gateless: h' = sigmoid(W [x, h] + b), one linear layer whose two halves are kept apart."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs, self.hidden = inputs, hidden
        self.weight_ih = nn.Parameter(torch.empty(hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(hidden, hidden))
        self.bias = nn.Parameter(torch.empty(hidden))
        for p in self.parameters():  # as torch.nn.Linear(inputs + hidden, hidden)
            nn.init.uniform_(p, -1 / math.sqrt(inputs + hidden), 1 / math.sqrt(inputs + hidden))

    def project(self, x: Tensor) -> Tensor:
        """The input's share."""
        return F.linear(x, self.weight_ih, self.bias)

    def advance(self, p: Tensor, h: Tensor) -> Tensor:
        """h' = sigmoid(p + W_h h)."""
        return torch.sigmoid(p.to(h.dtype) + F.linear(h, self.weight_hh).to(h.dtype))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step."""
        return self.advance(self.project(x), h)


CELLS: dict[str, type[GRUCell] | type[ElmanCell]] = {"gru": GRUCell, "elman": ElmanCell}


def share_with_torch_gru(cell: GRUCell) -> nn.GRU:
    """A torch.nn.GRU (time first) on the cell's own parameters."""
    gru = nn.GRU(cell.inputs, cell.hidden, device="meta")
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(gru, f"{name}_l0", getattr(cell, name))
    return gru
