"""Recurrent cells as plain matrix products: the part that needs no state first, then the rest.

    p = cell.project(x)                    all symbols at once, one product
    h = cell.advance(p, h)                 one step (or one step of many nodes at once)

The time tree goes back through two applications only, so it uses a written-out form of the same
step and spends no time on graphs. What does not need the slope is done for all its applications,
the sides, at once:

    kept = cell.room(sides, rows, h)       memory for what the backward needs
    h = cell.trace(p, h, kept, side)       `advance` that fills one side of it
    f = cell.factors(kept)                 d = f * g: the slopes at the pre-activations
    dh = cell.slopes(f, kept, side, g, d)  fills d for the slope g at the next state
    cell.add_gradients(x, h, d)            the weights' gradients, from all rows at once

Shapes: x (…, inputs), p (…, G) with G = 3 H or H, h (…, H), f (sides, rows, P, H), d (rows, P, H),
where P blocks of width H are what a cell's gradients are made of: 4 (GRU) or 1 (Elman).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray.core.gradients import accumulate

Kept = tuple[Tensor, ...]


def add_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add to a parameter's gradient."""
    accumulate(parameter, like(grad, parameter))


def like(t: Tensor, other: Tensor) -> Tensor:
    """In the type of another one: under autocast products are bfloat16, states are not.

    Asking first is several times as fast as a `to` that has nothing to do.
    """
    return t if t.dtype is other.dtype else t.to(other.dtype)


def product(h: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """W h + b in given memory; autocast, which knows no `out`, needs memory of its own first."""
    if torch.is_autocast_enabled(h.device.type):
        return out.copy_(F.linear(h, weight, bias))
    return torch.addmm(bias, h, weight.t(), out=out)


def over_rows(d: Tensor, x: Tensor) -> Tensor:
    """d^T x; a narrow x goes first, which is several times as fast."""
    return d.t() @ x if x.shape[1] > 8 else (x.t() @ d).t().contiguous()


class Cell(Protocol):
    """What the time tree and BPTT need of a cell."""

    hidden: int
    blocks: int  # P

    def project(self, x: Tensor) -> Tensor:
        """The input's share of the pre-activations."""

    def advance(self, p: Tensor, h: Tensor) -> Tensor:
        """The next state."""

    def room(self, sides: int, rows: int, h: Tensor) -> Kept:
        """Memory for what the backward of some applications needs, of the type of h."""

    def trace(self, p: Tensor, h: Tensor, kept: Kept, side: int) -> Tensor:
        """The next state; fills one side of `kept`."""

    def factors(self, kept: Kept) -> Tensor:
        """What the slope at the next state is multiplied by: (sides, rows, P, H)."""

    def slopes(
        self, f: Tensor, kept: Kept, side: int, g: Tensor, d: Tensor, state: bool = False
    ) -> Tensor | None:
        """Fill d for the slope g at the next state; returns the slope at h if `state`."""

    def diagonal(self, f: Tensor, kept: Kept, side: int) -> Tensor:
        """The diagonals of the Jacobians of an application: (rows, H)."""

    def add_gradients(self, x: Tensor, h: Tensor, d: Tensor) -> None:
        """Add the weights' gradients of the rows with inputs x, states h and slopes d."""


class GRUCell(nn.Module):
    """torch.nn.GRUCell's formulas, parameters and initialisation."""

    blocks = 4

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
        H2 = 2 * self.hidden
        p, from_h = like(p, h), like(F.linear(h, self.weight_hh, self.bias_hh), h)
        r, z = torch.sigmoid(p[..., :H2] + from_h[..., :H2]).chunk(2, -1)
        n = torch.tanh(torch.addcmul(p[..., H2:], r, from_h[..., H2:]))
        return torch.lerp(n, h, z)

    def room(self, sides: int, rows: int, h: Tensor) -> Kept:
        """Gates r and z with the state's share of the candidate; the candidate n; the next state"""
        rest = h.new_empty(2, sides, rows, self.hidden)
        return (h.new_empty(sides, rows, 3 * self.hidden), *rest.unbind(0))

    def trace(self, p: Tensor, h: Tensor, kept: Kept, side: int) -> Tensor:
        """`advance`."""
        H2, p = 2 * self.hidden, like(p, h)
        from_h, n, after = (t[side] for t in kept)
        product(h, self.weight_hh, self.bias_hh, from_h)
        from_h[:, :H2].add_(p[:, :H2]).sigmoid_()
        r, z, share = from_h.chunk(3, -1)
        torch.addcmul(p[:, H2:], r, share, out=n).tanh_()
        return torch.lerp(n, h, z, out=after)

    def factors(self, kept: Kept) -> Tensor:
        """Slopes at the candidate (input's share), at r, at z, at the candidate (state's share)."""
        gates, n, after = kept
        r, z, share = gates.chunk(3, -1)
        f = n.new_empty(*n.shape[:2], 4, self.hidden)
        at_n, at_r, at_z, at_share = f.unbind(2)
        torch.addcmul(n.new_ones(()), n, n, value=-1, out=at_n)  # tanh' = 1 - n^2
        at_n.addcmul_(at_n, z, value=-1)  # 1 - z times it
        torch.mul(at_n, r, out=at_share)
        torch.mul(at_share, share, out=at_r).addcmul_(at_r, r, value=-1)
        torch.sub(after, n, out=at_z).addcmul_(at_z, z, value=-1)  # after - n = z (h - n)
        return f

    def slopes(
        self, f: Tensor, kept: Kept, side: int, g: Tensor, d: Tensor, state: bool = False
    ) -> Tensor | None:
        """Backward of `trace`."""
        torch.mul(f[side], g.unsqueeze(1), out=d)
        if not state:
            return None
        gz = g * kept[0][side, :, self.hidden : 2 * self.hidden]
        return like(torch.addmm(gz, d[:, 1:].flatten(1), self.weight_hh), g)

    def diagonal(self, f: Tensor, kept: Kept, side: int) -> Tensor:
        """z itself, and what goes through r, z and the state's share of the candidate."""
        own = self.weight_hh.view(3, self.hidden, self.hidden).diagonal(0, 1, 2)
        z = kept[0][side, :, self.hidden : 2 * self.hidden]
        return z + (f[side, :, 1:] * like(own, f)).sum(1)

    def add_gradients(self, x: Tensor, h: Tensor, d: Tensor) -> None:
        """Gradients of the four parameters; d has the candidate's block first, they have it last"""
        H = self.hidden
        flat = d.view(len(d), -1)
        bias = flat.sum(0)
        add_grad(self.weight_ih, over_rows(flat[:, : 3 * H], x).roll(-H, 0))
        add_grad(self.weight_hh, over_rows(flat[:, H:], h))
        add_grad(self.bias_ih, bias[: 3 * H].roll(-H))
        add_grad(self.bias_hh, bias[H:])

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step."""
        return self.advance(self.project(x), h)


class ElmanCell(nn.Module):
    """Gateless: h' = sigmoid(W [x, h] + b), one linear layer whose two halves are kept apart."""

    blocks = 1

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
        return torch.sigmoid(like(p, h) + like(F.linear(h, self.weight_hh), h))

    def room(self, sides: int, rows: int, h: Tensor) -> Kept:
        """The next state itself is all that its slope needs."""
        return (h.new_empty(sides, rows, self.hidden),)

    def trace(self, p: Tensor, h: Tensor, kept: Kept, side: int) -> Tensor:
        """`advance`."""
        from_h = like(F.linear(h, self.weight_hh), h)
        return torch.add(like(p, h), from_h, out=kept[0][side]).sigmoid_()

    def factors(self, kept: Kept) -> Tensor:
        """sigmoid' = h' - h'^2."""
        after = kept[0]
        return torch.addcmul(after, after, after, value=-1).unsqueeze(2)

    def slopes(
        self, f: Tensor, kept: Kept, side: int, g: Tensor, d: Tensor, state: bool = False
    ) -> Tensor | None:
        """Backward of `trace`."""
        torch.mul(f[side], g.unsqueeze(1), out=d)
        return like(d[:, 0] @ self.weight_hh, g) if state else None

    def diagonal(self, f: Tensor, kept: Kept, side: int) -> Tensor:
        """What goes through the cell's own weight."""
        return f[side, :, 0] * like(self.weight_hh.diagonal(), f)

    def add_gradients(self, x: Tensor, h: Tensor, d: Tensor) -> None:
        """Gradients of the three parameters."""
        flat = d.view(len(d), -1)
        add_grad(self.weight_ih, over_rows(flat, x))
        add_grad(self.weight_hh, over_rows(flat, h))
        add_grad(self.bias, flat.sum(0))

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
