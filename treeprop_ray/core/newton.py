"""recipe=newton: the deployed cell learns on its own states, which are found by sweeps over all
positions at once, and from its own label, whose gradient comes back by such sweeps.

A sweep starts from a guess of all states, h_0 … h_{N-1}, and goes one cell further everywhere. That
alone would carry a change one position on. Newton's method takes the change along, by the diagonal
a_t of the cell's Jacobian, and the line of positions becomes a linear recurrence, which a scan
solves in log2 N rounds of sums and products:

    f_t = f_0(g_{t-1}, x_t)                      the cell, at the guess g
    h_t = f_t + a_t (h_{t-1} - g_{t-1})          one sweep; its h_t are the next guess

    start    the tree's states at even positions, f_0 of them at odd ones
    ahead    K sweeps; then h_t = f_0 of the last guess, and the label at h_N
    back     K sweeps over the slopes s_t at h_t:   s_{t-1} = a_t s_t + (J_t^T - a_t) s'_t
             with s' those of the sweep before (the first: none), J_t at the last guess

After N sweeps both are exact, so it is backpropagation through time; few come close where the tree
starts near and the cell is nearly diagonal. One after the other are D + 2 K + 2 applications of a
cell or its transpose in place of 2 N, and 2 K scans. Diagonals beyond 1 would let errors grow from
position to position: they are cut there, and time.damping makes all of them smaller.

Legend: B batch, M nodes, N = 2 M symbols, S numbers per symbol, H hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from treeprop_ray.core.cells import Cell, Kept
from treeprop_ray.core.scan import scan
from treeprop_ray.core.time_tree import Terms, TimeRule, square_error


class Newton:
    """The deployed cell's share of a piece of the batch, in place of the nodes of depth 0."""

    def __init__(self, cell: Cell, rule: TimeRule) -> None:
        self.cell, self.rule, self.d = cell, rule, 0
        self._kept: _Pass | None = None

    def ahead(
        self, x_BNS: Tensor, states_BMH: Tensor, halo: int = 0, beyond_BH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Every second state to (h_0 … h_{N-1}, h_N for the readout)."""
        assert not halo and beyond_BH is None  # a window would cut the scan
        cell, (B, M, H) = self.cell, states_BMH.shape
        N = 2 * M
        x = x_BNS.reshape(B * N, -1)
        p, even = cell.project(x), states_BMH.reshape(B * M, H)
        odd = cell.trace(p.view(B * M, 2, -1)[:, 0], even, cell.room(1, B * M, even), 0)
        guess = torch.stack((even, odd), 1).view(B * N, H)
        kept = cell.room(1, B * N, guess)
        for _ in range(self.rule.sweeps):
            found = cell.trace(p, guess, kept, 0)
            a = self._diagonal(cell.factors(kept), kept)
            along = torch.addcmul(found, a, guess, value=-1)
            solved = scan(a.view(B, N, H), along.view(B, N, H))
            guess = F.pad(solved[:, :-1], (0, 0, 1, 0)).view(B * N, H)
        found = cell.trace(p, guess, kept, 0)
        self._kept = _Pass(x, guess, kept, B)
        return guess.view(B, N, H), found.view(B, N, H)[:, -1]

    def back(self, answer_BH: Tensor | None, batch: int) -> Terms:
        """Gradients of the cell; `cons` says how far the last guess was from the states after it,
        and is no part of the objective."""
        kept, self._kept = self._kept, None
        assert kept is not None and answer_BH is not None
        cell, B = self.cell, kept.B
        N, H = self.rule.N, cell.hidden
        f, after = cell.factors(kept.cell), kept.cell[-1][0].view(B, N, H)
        a = self._diagonal(f, kept.cell)
        # row t is about h_{t+1}: its slope there, and the diagonal on the way to it from h_t
        way = F.pad(a.view(B, N, H)[:, 1:], (0, 0, 0, 1)).flip(1)
        label = F.pad(answer_BH.unsqueeze(1), (0, 0, N - 1, 0))
        slope = scan(way, label.flip(1)).flip(1)
        d = slope.new_empty(B * N, cell.blocks, H)
        for _ in range(self.rule.sweeps):
            flat = slope.reshape(B * N, H)
            through = cell.slopes(f, kept.cell, 0, flat, d, state=True)
            assert through is not None
            rest = torch.addcmul(through, a, flat, value=-1).view(B, N, H)
            source = F.pad(rest[:, 1:], (0, 0, 0, 1)) + label
            slope = scan(way, source.flip(1)).flip(1)
        cell.slopes(f, kept.cell, 0, slope.reshape(B * N, H), d)
        cell.add_gradients(kept.x, kept.guess, d)
        guess = kept.guess.view(B, N, H)
        return {"cons": square_error(after[:, :-1], guess[:, 1:], batch * (N - 1))[0]}

    def forget(self) -> None:
        """Drop a pass that will not be finished."""
        self._kept = None

    def _diagonal(self, f: Tensor, kept: Kept) -> Tensor:
        """a_t, damped."""
        return self.cell.diagonal(f, kept, 0).clamp(-1, 1) * (1 - self.rule.damping)


class _Pass(NamedTuple):
    """What is kept between ahead and back; rows are (sample, position)."""

    x: Tensor
    guess: Tensor  # h_0 … h_{N-1}
    cell: Kept  # of the application after the last sweep; its last tensor is the next state
    B: int
