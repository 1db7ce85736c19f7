"""A recurrent cell of one's own, `h = module(x, h)`, as the time tree and BPTT need it (cells.py).

Its gradients are autograd's: an application keeps its x and h, and whoever goes back runs it once
more with a graph. So it must give the same state for the same x and h, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from treeprop_ray.core.cells import Kept, like
from treeprop_ray.core.gradients import accumulate
from treeprop_ray.errors import UserError

ROWS = 16  # of the example that a cell is tried on


@contextmanager
def graph() -> Iterator[None]:
    """Autograd; without the casts that autocast has kept from where there was no graph."""
    torch.clear_autocast_cache()
    with torch.enable_grad():
        yield


class OwnCell(nn.Module):
    """The user's module in the place of a cell. A method `diagonal(x, h)` of the module, if there
    is one, gives the diagonals of its Jacobians, d h'_i / d h_i, to recipe=newton."""

    blocks = 1  # all that is kept of a slope is the slope at the next state

    def __init__(self, step: nn.Module, inputs: int, hidden: int) -> None:
        super().__init__()
        self.step, self.inputs, self.hidden = step, inputs, hidden

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step."""
        return like(self.step(x, h), h)

    def project(self, x: Tensor) -> Tensor:
        """Nothing is known to need no state."""
        return x

    def advance(self, p: Tensor, h: Tensor) -> Tensor:
        """The next state."""
        after: Tensor = self(p, h)
        return after

    def room(self, sides: int, rows: int, h: Tensor) -> Kept:
        """The inputs, the state, the next state."""
        widths = (self.inputs, self.hidden, self.hidden)
        return tuple(h.new_empty(sides, rows, width) for width in widths)

    def trace(self, p: Tensor, h: Tensor, kept: Kept, side: int) -> Tensor:
        """`advance`."""
        x, before, after = (t[side] for t in kept)
        return after.copy_(self.advance(x.copy_(p), before.copy_(h)))

    def factors(self, kept: Kept) -> Tensor:
        """None: autograd has its own."""
        return kept[2].unsqueeze(2)

    def slopes(
        self, f: Tensor, kept: Kept, side: int, g: Tensor, d: Tensor, state: bool = False
    ) -> Tensor | None:
        """Backward of `trace`."""
        d.copy_(g.unsqueeze(1))
        if not state:
            return None
        with graph():
            h = kept[1][side].detach().requires_grad_()
            after = self.advance(kept[0][side], h)
            (back,) = torch.autograd.grad(after, h, g, materialize_grads=True)
        return back

    def diagonal(self, f: Tensor, kept: Kept, side: int) -> Tensor:
        """The module's own, or a backward for each number of the state."""
        x, h = kept[0][side], kept[1][side]
        if (own := getattr(self.step, "diagonal", None)) is not None:
            return like(own(x, h), h)
        found = torch.empty_like(h)
        with graph():
            h = h.detach().requires_grad_()
            for i, after in enumerate(self.advance(x, h).sum(0).unbind()):
                (slope,) = torch.autograd.grad(after, h, retain_graph=True, materialize_grads=True)
                found[:, i] = slope[:, i]
        return found

    def add_gradients(self, x: Tensor, h: Tensor, d: Tensor) -> None:
        """Gradients of all parameters that train; 0 for those that are not used."""
        weights = [p for p in self.parameters() if p.requires_grad]
        with graph():
            after = self.advance(x, h)
            slope = d.reshape(after.shape)
            found = torch.autograd.grad(after, weights, slope, materialize_grads=True)
        for weight, gradient in zip(weights, found, strict=True):
            accumulate(weight, gradient)

    def check(self, dtype: torch.dtype) -> None:
        """UserError with a reason, for an example, where this is no cell of these widths."""
        draw = torch.Generator().manual_seed(0)
        x = torch.rand(ROWS, self.inputs, generator=draw).to(dtype)
        h = torch.rand(ROWS, self.hidden, generator=draw).to(dtype)
        given = f"for x {tuple(x.shape)} and h {tuple(h.shape)}"
        after = self.step(x, h)
        if not isinstance(after, Tensor):
            raise UserError(f"must give one state, not a {type(after).__name__}, {given}")
        if after.shape != h.shape:
            raise UserError(f"must give a state like h, not {tuple(after.shape)}, {given}")
        if not after.requires_grad:
            raise UserError("has no weight that trains")
        if not torch.equal(after, self.step(x, h)):
            raise UserError(
                "must give the same state for the same x and h: no dropout, nothing in place"
            )
        if not torch.allclose(after[:2], self.step(x[:2], h[:2]), rtol=1e-3, atol=1e-4):
            raise UserError("must treat every row on its own: no statistics over the batch")
        if (own := getattr(self.step, "diagonal", None)) is not None:
            slopes = own(x, h)
            if not isinstance(slopes, Tensor) or slopes.shape != h.shape:
                raise UserError(f"diagonal(x, h) must give a tensor like h, {given}")
