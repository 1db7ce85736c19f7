"""recipe=lookahead: the deployed cell learns on its own states, and the coarse cells tell it why.

The deployed cell f_0 is not trained on the tree's states at all: it has no nodes, and the tree ends
at depth 1. Instead it goes over the sequence once, as it does when deployed. Its backward is cut
into windows of W symbols that go back side by side. What backpropagation through time would bring a
window from behind, the coarser cells bring instead: from the end of every window they go on to the
end of the sequence, where the label is.

    t      0          16          32          48          64        D = 6, W = 16
    roll   ├───────────┼───────────┼───────────┼───────────┤        f_0, step by step
    look              16─────────►32──────────────────────►64       f_4 f_5
                                  32──────────────────────►64       f_5
                                              48─────────►64        f_4

Objective, added to that of the tree's depths 1 … D-1: the sum over the windows' ends of the
cross-entropy at the label that they lead to. It goes back over the same jumps into the window. So
f_0 gets, on the states that it meets when deployed, the gradient of the label over at most W steps
and log2(N / W) jumps, and the coarser cells learn to go on from such states. Backward span:
W + log2(N / W); the forward of the deployed cell is N steps, at the same time as the tree's.

Legend: B batch, N symbols, S numbers per symbol, H hidden width, n = N / W windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treeprop_ray.core.cells import Cell, Kept
from treeprop_ray.core.jumps import jumps, window_of
from treeprop_ray.core.time_tree import Name


def look_names(n: int) -> list[Name]:
    """The loss terms of n windows' ends; the last one is h_N itself."""
    return [(0, "look")] * (n - 1) + [(0, "roll")]


class Roll:
    """The deployed cell's share: the whole sequence ahead, all windows back."""

    def __init__(self, cell: Cell, D: int) -> None:
        self.cell, self.W = cell, window_of(D)
        self._kept: tuple[Tensor, Tensor, Kept] | None = None

    def ahead(self, x_BNS: Tensor) -> Tensor:
        """The states at the ends of the windows: (n, B, H)."""
        cell, W = self.cell, self.W
        B, N, _ = x_BNS.shape
        # (W, n, B, S): a step of all windows is one block of rows, as the backward wants it
        x = x_BNS.view(B, N // W, W, -1).permute(2, 1, 0, 3).reshape(N * B, -1)
        p = cell.project(x).view(N, B, -1)
        states = x.new_empty(W + 1, N // W, B, cell.hidden)  # states[t, j] is h_{jW + t}
        kept = cell.room(W, N // W * B, states)
        h = x.new_zeros(B, cell.hidden)
        for j in range(N // W):
            mine = tuple(t[:, j * B : (j + 1) * B] for t in kept)
            states[0, j] = h
            for t in range(W):
                h = cell.trace(p[t * (N // W) + j], h, mine, t)
                states[t + 1, j] = h
        self._kept = x, states[:-1].view(N * B, -1), kept
        return states[-1]

    def back(self, slope_nBH: Tensor) -> None:
        """Gradients of the deployed cell."""
        kept, self._kept = self._kept, None
        assert kept is not None
        x, states, sides = kept
        cell, g = self.cell, slope_nBH.flatten(0, 1)
        d = g.new_empty(self.W, len(g), cell.blocks, cell.hidden)
        f = cell.factors(sides)
        for t in reversed(range(self.W)):
            back = cell.slopes(f, sides, t, g, d[t], state=t > 0)
            g = g if back is None else back
        cell.add_gradients(x, states, d.flatten(0, 1))

    def forget(self) -> None:
        """Drop a pass that will not be finished."""
        self._kept = None


class Jump:
    """A coarser cell's share: takes some of the ends 2**d symbols on."""

    def __init__(self, cell: Cell, d: int, D: int) -> None:
        self.cell, self.d = cell, d
        moved = jumps(D, window_of(D))[d]
        self.which, self.times = [j for j, _ in moved], [t for _, t in moved]
        self._kept: tuple[Tensor, Tensor, Kept] | None = None

    def ahead(self, x_BNS: Tensor, ends_nBH: Tensor) -> Tensor:
        """The ends, of which this depth has moved its own."""
        cell = self.cell
        x = torch.cat([x_BNS[:, t : t + 2**self.d].flatten(1) for t in self.times])
        h = ends_nBH[self.which].flatten(0, 1)
        kept = cell.room(1, len(h), h)
        after = cell.trace(cell.project(x), h, kept, 0)
        self._kept = x, h, kept
        moved = ends_nBH.clone()
        moved[self.which] = after.view(len(self.which), *ends_nBH.shape[1:])
        return moved

    def back(self, slope_nBH: Tensor) -> Tensor:
        """Adds this cell's gradients; the slope at the ends before the jump."""
        kept, self._kept = self._kept, None
        assert kept is not None
        x, h, sides = kept
        cell, g = self.cell, slope_nBH[self.which].flatten(0, 1)
        d = g.new_empty(len(g), cell.blocks, cell.hidden)
        before = cell.slopes(cell.factors(sides), sides, 0, g, d, state=True)
        assert before is not None
        cell.add_gradients(x, h, d)
        slope = slope_nBH.clone()
        slope[self.which] = before.view(len(self.which), *slope.shape[1:])
        return slope

    def forget(self) -> None:
        """Drop a pass that will not be finished."""
        self._kept = None
