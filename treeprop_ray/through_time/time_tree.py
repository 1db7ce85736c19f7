"""One training step of TreeProp-TT: depth by depth, all nodes of a depth in one batched call.

N = 2**D symbols, states h_0 … h_N. Depth d serves the nodes n = 2**d, 3 * 2**d, 5 * 2**d, …; each
reads the state l = n - 2**d and has the target r = n + 2**d. N = 8:

    depth 2    0 ═══════════════ 4 ─────────────── 8        ═ h_n = f_d(h_l, x[l:n])
    depth 1    0 ═════ 2 ─────── 4 ═════ 6 ─────── 8        ─ h_r_hat = f_d(h_n, x[n:r])
    depth 0    0 ═ 1 ─ 2 ═ 3 ─── 4 ═ 5 ─ 6 ═ 7 ─── 8

Loss of a depth: sum_j (h_r_hat - h_r)_j^2, mean over batch and nodes, plus the cross-entropy of
readout(h_N_hat). h_l and h_r are constants, so the gradient passes two applications of f_d and
nothing else: a depth can go back and update while the next one goes ahead. The two applications
read all symbols between them, cut into pieces of 2**d, so one product projects them all.

Consistency (depth 0): K sweeps h_t <- f_0(h_{t-1}, x_t) of all positions at once, from the tree's
states; squared distance of the last sweep to the tree's states, gradient through that sweep only.
The first sweep is what depth 0 has just computed: h_n and h_r_hat.

Legend: B batch, M nodes of a depth, N symbols, S numbers per symbol, H hidden width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray.factor import full
from treeprop_ray.through_time.cells import Cell

Terms = dict[str, Tensor]  # unweighted loss terms
Autocast = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class TimeRule:
    """Settings of the time tree."""

    depth: int
    sweeps: int = 0
    lambda_cons: float = 1.0

    @property
    def N(self) -> int:
        """Number of symbols."""
        return 2**self.depth


class Depth:
    """One depth's work on a piece of the batch: ahead, then back with the readout's answer."""

    def __init__(self, cell: Cell, d: int, rule: TimeRule, autocast: Autocast) -> None:
        self.cell, self.d, self.rule, self.autocast = cell, d, rule, autocast
        self.sweeps = rule.sweeps if d == 0 else 0
        self._hat: Tensor | None = None  # h_r_hat with its graph
        self._targets: Tensor | None = None  # h_r of all nodes but the last
        self._swept: tuple[Tensor, Tensor] | None = None  # last sweep with its graph, tree states

    def ahead(self, x_BNS: Tensor, states_BMH: Tensor) -> tuple[Tensor, Tensor]:
        """Every 2**(d+1)-th state to (every 2**d-th state, h_N_hat for the readout)."""
        B, M, H = states_BMH.shape
        with self.autocast():
            p_all = self.cell.project(x_BNS.reshape(B, 2 * M, -1))
            p_left, p_right = p_all.unflatten(1, (M, 2)).unbind(2)
            h_n = self.cell.advance(p_left, states_BMH)
            self._hat = self.cell.advance(p_right, h_n)
        self._targets = states_BMH[:, 1:]
        h_n, hat = h_n.detach(), self._hat.detach()
        finer = torch.stack((states_BMH, h_n), 2).view(B, 2 * M, H)
        if self.sweeps:
            once = torch.stack((h_n, hat), 2).view(B, 2 * M, H)
            self._swept = (self._sweep(p_all, once, finer), finer[:, 1:])
        return finer, hat[:, -1]

    def _sweep(self, p: Tensor, once: Tensor, tree: Tensor) -> Tensor:
        """h_1 … h_N after K sweeps from `tree`, h_0 … h_{N-1}; `once`: after the first of them."""
        if self.sweeps == 1:
            before = tree
        else:
            before = torch.cat((tree[:, :1], once[:, :-1]), 1)
        with self.autocast():
            with torch.no_grad():
                for _ in range(self.sweeps - 2):
                    before = torch.cat((tree[:, :1], self.cell.advance(p, before)[:, :-1]), 1)
            return self.cell.advance(p, before)

    def back(self, answer_BH: Tensor, batch: int) -> Terms:
        """Backward of this depth; `answer` is d CE / d h_N_hat.

        Means are over `batch`, the whole batch, of which this may be a piece. The slopes of the
        squared errors are written out, so no loss enters the graph.
        """
        assert self._hat is not None and self._targets is not None
        terms: Terms = {}
        errors = self._hat[:, :-1].detach() - self._targets
        slope = answer_BH.unsqueeze(1)
        if errors.shape[1]:
            share = 1 / (batch * errors.shape[1])
            terms["right"] = errors.square().sum() * share
            slope = torch.cat((errors * (2 * share), slope), 1)
        roots, slopes = [self._hat], [slope]
        if self._swept is not None:
            swept, tree = self._swept  # h_N has no tree state to be near to
            errors = swept[:, :-1].detach() - tree
            share = 1 / (batch * errors.shape[1])
            terms["cons"] = errors.square().sum() * share
            roots.append(swept)
            slopes.append(F.pad(errors * (2 * share * self.rule.lambda_cons), (0, 0, 0, 1)))
        torch.autograd.backward(roots, slopes)
        self._hat = self._targets = self._swept = None
        return terms


class Readout:
    """The classifier on h_N; every depth asks it once per piece, and its gradients add up."""

    def __init__(self, module: nn.Linear, autocast: Autocast) -> None:
        self.module, self.autocast = module, autocast

    @torch.no_grad()
    def answer(self, hat_BH: Tensor, onehot_BC: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """(cross-entropy as a share of the whole batch's mean, its slope at h_N_hat).

        It is asked D times a step, so softmax(logits) - onehot is written out: a graph of its own
        would take twice the time.
        """
        weight, bias = self.module.weight, self.module.bias
        with self.autocast():
            log_p = full(self.module(hat_BH)).log_softmax(-1)
            slope = (log_p.exp() - onehot_BC).div_(batch)
            _add_grad(weight, slope.t() @ hat_BH)
            _add_grad(bias, slope.sum(0))
            back = (slope @ weight).to(hat_BH.dtype)
        return (log_p * onehot_BC).sum() / -batch, back

    def onehot(self, y: Tensor) -> Tensor:
        """Labels as `answer` takes them, made once for all depths."""
        weight = self.module.weight
        return F.one_hot(y, len(weight)).to(weight.dtype)


def _add_grad(parameter: Tensor, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def first_states(x_BNS: Tensor, hidden: int) -> Tensor:
    """h_0 = 0, as the only state that the coarsest depth reads: (B, 1, H)."""
    return x_BNS.new_zeros(len(x_BNS), 1, hidden)
