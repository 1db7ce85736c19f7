"""One training step of TreeProp-TT: depth by depth, all nodes of a depth in one batched call.

N = 2**D symbols, states h_0 … h_N. Depth d serves the nodes n = 2**d, 3 * 2**d, 5 * 2**d, …; each
reads the state l = n - 2**d and has the target r = n + 2**d. N = 8:

    depth 2    0 ═══════════════ 4 ─────────────── 8        ═ h_n = f_d(h_l, x[l:n])
    depth 1    0 ═════ 2 ─────── 4 ═════ 6 ─────── 8        ─ h_r_hat = f_d(h_n, x[n:r])
    depth 0    0 ═ 1 ─ 2 ═ 3 ─── 4 ═ 5 ─ 6 ═ 7 ─── 8

Loss of a depth: sum_j (h_r_hat - h_r)_j^2, mean over batch and nodes, plus the cross-entropy of
readout(h_N_hat). h_l and h_r are constants, so the gradient passes two applications of f_d and
nothing else (time.gradient=one: the second alone): a depth can go back and update while the next
one goes ahead. The two applications read all symbols between them, cut into pieces of 2**d, so one
product projects them all. Nothing here needs a graph: callers turn it off (and autocast on) for a
whole piece of the batch.

Consistency (depth 0): K sweeps h_t <- f_0(h_{t-1}, x_t) of all positions at once, from the tree's
states; squared distance of the last sweep to the tree's states, gradient through that sweep only.
The first sweep is what depth 0 has just computed: h_n and h_r_hat.

Legend: B batch, M nodes of a depth, N symbols, S numbers per symbol, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray.core.cells import Cell, Kept, add_grad, like
from treeprop_ray.core.factor import full

Terms = dict[str, Tensor]  # unweighted loss terms
Name = tuple[int, str]  # depth and term


@dataclass(frozen=True)
class TimeRule:
    """Settings of the time tree."""

    depth: int
    sweeps: int = 0
    lambda_cons: float = 1.0
    lookahead: bool = False  # recipe=lookahead: lookahead.py
    summed: bool = False  # time.loss=sum: over a depth's nodes, and the sweeps' positions
    one_step: bool = False  # time.gradient=one: h_n is a constant for h_r_hat
    newton: bool = False  # recipe=newton: newton.py
    damping: float = 0.0

    @property
    def N(self) -> int:
        """Number of symbols."""
        return 2**self.depth


class Depth:
    """One depth's work on a piece of the batch: ahead, then back with the readout's answer.

    It may be given a window of the depth's nodes (distributed.py): then `halo` nodes at its front
    are there only because the sweeps look back, and `beyond` is the state behind the window, the
    target of its last node.
    """

    def __init__(self, cell: Cell, d: int, rule: TimeRule) -> None:
        self.cell, self.d, self.rule = cell, d, rule
        self.sweeps = rule.sweeps if d == 0 else 0
        self._kept: _Pass | None = None

    def ahead(
        self, x_BNS: Tensor, states_BMH: Tensor, halo: int = 0, beyond_BH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Every 2**(d+1)-th state to (every 2**d-th state, h_N_hat for the readout)."""
        B, M, H = states_BMH.shape
        R = B * M  # nodes of all samples are rows of one matrix
        x, states = x_BNS.reshape(2 * R, -1), states_BMH.view(R, H)
        p_all = self.cell.project(x)
        p_left, p_right = p_all.view(R, 2, -1).unbind(1)
        kept = self.cell.room(2, R, states)
        h_n = self.cell.trace(p_left, states, kept, 0)
        hat = self.cell.trace(p_right, h_n, kept, 1)
        finer = torch.stack((states, h_n), 1).view(2 * R, H)
        swept = None
        if self.sweeps:
            once = torch.stack((h_n, hat), 1).view(2 * R, H)
            swept = self._sweep(p_all, finer, once, 2 * M)
        hat_BMH = hat.view(B, M, H)
        self._kept = _Pass(x, states_BMH, finer, hat_BMH, kept, swept, halo, beyond_BH)
        return finer.view(B, 2 * M, H)[:, 2 * halo :], hat_BMH[:, -1]

    def forget(self) -> None:
        """Drop a pass that will not be finished."""
        self._kept = None

    def _sweep(self, p: Tensor, tree: Tensor, once: Tensor, N: int) -> _Sweep:
        """h_1 … h_N after K sweeps from `tree`, h_0 … h_{N-1}; `once` is after the first."""
        before, after, kept = tree, once, self.cell.room(1, len(tree), tree)
        for _ in range(1, self.sweeps):
            before = after.roll(1, 0)
            before[::N] = 0  # h_0 of every sample
            after = self.cell.trace(p, before, kept, 0)
        if self.sweeps == 1:
            self.cell.trace(p, before, kept, 0)  # `once` again, with what the backward needs
        return _Sweep(before, after, kept, tree, N)

    def back(self, answer_BH: Tensor | None, batch: int) -> Terms:
        """Gradients of this depth's cell; `answer` is d CE / d h_N_hat, if the last node is here.

        Means are over `batch`, the whole batch, of which this may be a piece.
        """
        kept, self._kept = self._kept, None
        assert kept is not None
        terms: Terms = {}
        nodes = self.rule.N >> (self.d + 1)  # of the whole depth
        slopes = [] if answer_BH is None else [answer_BH.unsqueeze(1)]
        hat, h_r = against(kept.hat, kept.states, kept.halo, kept.beyond)
        if hat.shape[1]:
            count = 1 if self.rule.summed else nodes - 1
            terms["right"], right = square_error(hat, h_r, batch * count)
            slopes.insert(0, right)
        slope_BMH = slopes[0] if len(slopes) == 1 else torch.cat(slopes, 1)
        if kept.halo:
            slope_BMH = F.pad(slope_BMH, (0, 0, kept.halo, 0))
        slope = slope_BMH.flatten(0, 1)
        R, cell = len(slope), self.cell
        d = slope.new_empty(R, 2, cell.blocks, cell.hidden)
        d_n, d_r = d.unbind(1)
        f = cell.factors(kept.cell)
        dh_n = cell.slopes(f, kept.cell, 1, slope, d_r, state=not self.rule.one_step)
        if dh_n is None:
            d_n.zero_()
        else:
            cell.slopes(f, kept.cell, 0, dh_n, d_n)
        cell.add_gradients(kept.x, kept.finer, d.view(2 * R, -1))
        if kept.swept is not None:
            share = batch * (1 if self.rule.summed else self.rule.N - 1)
            terms["cons"], near = kept.swept.error(share, 2 * kept.halo, kept.beyond)
            near *= self.rule.lambda_cons
            d, sweep = torch.empty_like(d).flatten(0, 1), kept.swept.kept
            cell.slopes(cell.factors(sweep), sweep, 0, near, d)
            cell.add_gradients(kept.x, kept.swept.before, d)
        return terms


class _Sweep(NamedTuple):
    """The last sweep: states before and after it, and the tree's h_0 … h_{N-1}; rows B * N."""

    before: Tensor
    after: Tensor
    kept: Kept
    tree: Tensor
    N: int

    def error(self, share: int, halo: int, beyond_BH: Tensor | None) -> tuple[Tensor, Tensor]:
        """Squared distance to the tree's h_1 … h_{N-1} and its slope; h_N has no tree state."""
        after, tree = (t.unflatten(0, (-1, self.N)) for t in (self.after, self.tree))
        loss, slope = square_error(*against(after, tree, halo, beyond_BH), share)
        return loss, F.pad(slope, (0, 0, halo, int(beyond_BH is None))).flatten(0, 1)


class _Pass(NamedTuple):
    """What a depth keeps between ahead and back; rows are (sample, node)."""

    x: Tensor  # symbols in pieces of 2**d
    states: Tensor  # (B, M, H): h_l of every node; from the second on also h_r of the one before
    finer: Tensor  # h_l, h_n, h_l, h_n, …: what the two applications read
    hat: Tensor  # (B, M, H): h_r_hat
    cell: Kept  # what the cell needs to go back: side 0 is h_n, side 1 h_r_hat
    swept: _Sweep | None
    halo: int  # nodes at the front that have no loss here
    beyond: Tensor | None  # (B, H): the state behind the last one of `states`


def against(
    found: Tensor, states: Tensor, halo: int, beyond_BH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What was found for the next states, and these; the very last one has no target."""
    if beyond_BH is None:
        return found[:, halo:-1], states[:, halo + 1 :]
    return found[:, halo:], torch.cat((states[:, halo + 1 :], beyond_BH.unsqueeze(1)), 1)


def square_error(found: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Squared distance, summed over the width, mean over `count` states; and its slope."""
    errors = found - target
    share = 1 / count
    flat = errors.view(-1)
    return flat.dot(flat) * share, errors.mul_(2 * share)


class Readout:
    """The classifier on h_N. Asked once per piece of the batch, by each depth or for all of them.

    softmax(logits) - onehot is written out, and what its own gradient needs is kept until all have
    asked: graphs would take several times as long.
    """

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self._asked: list[tuple[Sequence[Name], Tensor, Tensor, Tensor]] = []

    def forget(self) -> None:
        """Drop questions of a step that will not be finished."""
        self._asked = []

    def onehot(self, y: Tensor) -> Tensor:
        """Labels as `answer` takes them, made once for all depths."""
        weight = self.module.weight
        return F.one_hot(y, len(weight)).to(weight.dtype)

    def answer(
        self, names: Sequence[Name], hat_nBH: Tensor, onehot_BC: Tensor, batch: int
    ) -> Tensor:
        """The slopes at n estimates of h_N of their cross-entropies, means over the whole batch.

        One product for each: then bits do not depend on how many are asked about at once.
        """
        weight_nCH = self.module.weight.expand(len(names), -1, -1)
        logits = full(torch.baddbmm(self.module.bias, hat_nBH, weight_nCH.mT))
        slope = logits.softmax(-1).sub_(onehot_BC).div_(batch)
        self._asked.append((names, hat_nBH, logits, slope))
        return like(torch.bmm(slope, weight_nCH), hat_nBH)

    def settle(self, onehot_BC: Tensor, batch: int) -> list[tuple[int, Terms]]:
        """After all have asked: the readout's gradient, and the cross-entropies by depth."""
        asked, self._asked = self._asked, []
        hats, logits, slopes = (torch.cat(t) for t in list(zip(*asked, strict=True))[1:])
        rows = slopes.flatten(0, 1)
        add_grad(self.module.weight, rows.t() @ hats.flatten(0, 1))
        add_grad(self.module.bias, rows.sum(0))
        values = (logits.log_softmax(-1) * onehot_BC).sum((1, 2)) / -batch
        names = (name for names, *_ in asked for name in names)
        return [(d, {k: value}) for (d, k), value in zip(names, values.unbind(), strict=True)]


def first_states(x_BNS: Tensor, hidden: int) -> Tensor:
    """h_0 = 0, as the only state that the coarsest depth reads: (B, 1, H)."""
    return x_BNS.new_zeros(len(x_BNS), 1, hidden)
