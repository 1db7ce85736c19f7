"""Recurrent cells as plain matrix products: the part that needs no state first, then the rest.

    p = cell.project(x)               all symbols at once, one product
    h = cell.advance(p, h)            one step (or one step of many nodes at once), for autograd
    h, kept = cell.trace(p, h)        the same, keeping what `slopes` needs
    dh = cell.slopes(kept, g, d)      backward of one step, written out; fills d
    cell.add_gradients(x, h, d)       the weights' gradients, from all rows at once

d[0] is the slope at p, d[1] that at the state's share a = W_hh h (+ b_hh). The time tree goes back
through two applications only, so it uses the written-out form and spends no time on graphs.
Shapes: x (…, inputs), p and a (…, G) with G = 3 H or H, h (…, H); d (2, rows, G).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kept = tuple[Tensor, ...]


def add_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add to a parameter's gradient."""
    grad = grad.to(parameter.dtype)
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class Cell(Protocol):
    """What the time tree and BPTT need of a cell."""

    hidden: int

    def project(self, x: Tensor) -> Tensor:
        """The input's share of the pre-activations."""

    def advance(self, p: Tensor, h: Tensor) -> Tensor:
        """The next state."""

    def trace(self, p: Tensor, h: Tensor) -> tuple[Tensor, Kept]:
        """The next state, and what `slopes` needs."""

    def slopes(self, kept: Kept, g: Tensor, d: Tensor, state: bool = False) -> Tensor | None:
        """Fill d for the slope g at the next state; returns the slope at h if `state`."""

    def add_gradients(self, x: Tensor, h: Tensor, d: Tensor) -> None:
        """Add the weights' gradients of the rows with inputs x, states h and slopes d."""


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
        """The next state."""
        return self.trace(p, h)[0]

    def trace(self, p: Tensor, h: Tensor) -> tuple[Tensor, Kept]:
        """h' = (1 - z) * n + z * h; keeps the gates, the candidate n and its recurrent share."""
        sizes = [2 * self.hidden, self.hidden]
        # under autocast the products are bfloat16; states and gates stay in the state's type
        p_gates, p_new = p.to(h.dtype).split(sizes, -1)
        from_h = F.linear(h, self.weight_hh, self.bias_hh).to(h.dtype)
        h_gates, h_new = from_h.split(sizes, -1)
        gates = torch.sigmoid(p_gates + h_gates)
        r, z = gates.chunk(2, -1)
        n = torch.tanh(torch.addcmul(p_new, r, h_new))
        return torch.lerp(n, h, z), (h, gates, r, z, n, h_new)

    def slopes(self, kept: Kept, g: Tensor, d: Tensor, state: bool = False) -> Tensor | None:
        """Backward of `trace`."""
        h, gates, r, z, n, h_new = kept
        dp, da = d.unbind(0)
        d_gates, d_n = dp.split([2 * self.hidden, self.hidden], -1)
        da_gates, da_n = da.split([2 * self.hidden, self.hidden], -1)
        gz = g * z
        at_n = g - gz
        torch.addcmul(at_n, at_n * n, n, value=-1, out=d_n)  # tanh' = 1 - n^2
        at_gates = torch.cat((d_n * h_new, (h - n).mul_(g)), -1)
        torch.mul(at_gates, torch.addcmul(gates, gates, gates, value=-1), out=d_gates)
        da_gates.copy_(d_gates)
        torch.mul(d_n, r, out=da_n)
        return torch.addmm(gz, da, self.weight_hh).to(g.dtype) if state else None

    def add_gradients(self, x: Tensor, h: Tensor, d: Tensor) -> None:
        """Gradients of the four parameters."""
        bias_ih, bias_hh = d.sum(1).unbind(0)
        add_grad(self.weight_ih, d[0].t() @ x)
        add_grad(self.weight_hh, d[1].t() @ h)
        add_grad(self.bias_ih, bias_ih)
        add_grad(self.bias_hh, bias_hh)

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

    def trace(self, p: Tensor, h: Tensor) -> tuple[Tensor, Kept]:
        """`advance`; the next state itself is all that its slope needs."""
        after = self.advance(p, h)
        return after, (after,)

    def slopes(self, kept: Kept, g: Tensor, d: Tensor, state: bool = False) -> Tensor | None:
        """Backward of `trace`."""
        after = kept[0]
        # sigmoid' = h' - h'^2; d[1] would be the same
        torch.mul(g, torch.addcmul(after, after, after, value=-1), out=d[0])
        return (d[0] @ self.weight_hh).to(g.dtype) if state else None

    def add_gradients(self, x: Tensor, h: Tensor, d: Tensor) -> None:
        """Gradients of the three parameters."""
        add_grad(self.weight_ih, d[0].t() @ x)
        add_grad(self.weight_hh, d[0].t() @ h)
        add_grad(self.bias, d[0].sum(0))

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
