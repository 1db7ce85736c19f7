"""Recurrent cells as plain matrix products: the part that needs no state first, then the rest.

    p = cell.project(x)               all symbols at once, one product
    h = cell.advance(p, h)            one step (or one step of many nodes at once), for autograd
    h, kept = cell.trace(p, h)        the same, keeping what `slopes` needs
    dh = cell.slopes(kept, g, dp, da) backward of one step, written out; fills dp and da

`dp` is the slope at p, `da` that at the state's share a = W_hh h (+ b_hh). The time tree goes back
through two applications only, so it uses the written-out form and spends no time on graphs.
Shapes: x (…, inputs), p and a (…, gates * H), h (…, H); gradients are added up over rows (R, …).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kept = tuple[Tensor, ...]
aten: Any = torch.ops.aten


def outer(d: Tensor, inputs: Tensor) -> Tensor:
    """Gradient of a weight: the sum over all rows (R, …) of d x inputs."""
    return d.t() @ inputs


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

    def slopes(
        self, kept: Kept, g: Tensor, dp: Tensor, da: Tensor, state: bool = False
    ) -> Tensor | None:
        """Fill dp and da for the slope g at the next state; dh if `state`."""

    def add_gradients(
        self, x: Tensor, dp: Tensor, applied: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Add the weights' gradients: dp at all projections of x, (h, da) of every application."""


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

    def trace(self, p: Tensor, h: Tensor) -> tuple[Tensor, Kept]:
        """`advance`, and the gates, candidate and its recurrent share."""
        sizes = [2 * self.hidden, self.hidden]
        p_gates, p_new = p.to(h.dtype).split(sizes, -1)
        from_h = F.linear(h, self.weight_hh, self.bias_hh).to(h.dtype)
        h_gates, h_new = from_h.split(sizes, -1)
        gates = torch.sigmoid(p_gates + h_gates)
        r, z = gates.chunk(2, -1)
        n = torch.tanh(torch.addcmul(p_new, r, h_new))
        return torch.lerp(n, h, z), (h, gates, r, z, n, h_new)

    def slopes(
        self, kept: Kept, g: Tensor, dp: Tensor, da: Tensor, state: bool = False
    ) -> Tensor | None:
        """Backward of `trace`."""
        h, gates, r, z, n, h_new = kept
        d_gates, d_n = dp.split([2 * self.hidden, self.hidden], -1)
        da_gates, da_n = da.split([2 * self.hidden, self.hidden], -1)
        gz = g * z
        aten.tanh_backward.grad_input(g - gz, n, grad_input=d_n)
        after = torch.cat((d_n * h_new, (h - n).mul_(g)), -1)  # slopes at the gates' values
        aten.sigmoid_backward.grad_input(after, gates, grad_input=d_gates)
        da_gates.copy_(d_gates)
        torch.mul(d_n, r, out=da_n)
        return torch.addmm(gz, da, self.weight_hh).to(g.dtype) if state else None

    def add_gradients(
        self, x: Tensor, dp: Tensor, applied: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Gradients of the four parameters."""
        add_grad(self.weight_ih, outer(dp, x))
        add_grad(self.bias_ih, dp.sum(0))
        for h, da in applied:
            add_grad(self.weight_hh, outer(da, h))
            add_grad(self.bias_hh, da.sum(0))

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
        """`advance`, and both states."""
        after = self.advance(p, h)
        return after, (after,)

    def slopes(
        self, kept: Kept, g: Tensor, dp: Tensor, da: Tensor, state: bool = False
    ) -> Tensor | None:
        """Backward of `trace`."""
        aten.sigmoid_backward.grad_input(g, kept[0], grad_input=dp)
        da.copy_(dp)
        return (da @ self.weight_hh).to(g.dtype) if state else None

    def add_gradients(
        self, x: Tensor, dp: Tensor, applied: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Gradients of the three parameters."""
        add_grad(self.weight_ih, outer(dp, x))
        add_grad(self.bias, dp.sum(0))
        for h, da in applied:
            add_grad(self.weight_hh, outer(da, h))

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
