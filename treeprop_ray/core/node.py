"""What a tree node computes: its forward step, and its backward step from explicit adjoints.

A node never sees another node's autograd graph. Tensors come in and go out detached:

    lift     (1)  mu_fwd = f_left(z_l)
    answer   (2)  g = d(right loss)/d(mu_fwd); the right block does its own backward here, once
    settle   (3)  mu = alpha * mu_fwd + beta * correction(g),  z_n = mu + sigma_s * eps
    backward (4)  from the adjoint of z_n (sum over its consumers): gradients of f_left,
                  and adjoints for z_l and z_r

At a spine node (2) is the head's business (`Boundary.answer`); the rest is the same.

input=sample and ce_at=sample have the right-hand loss at the sample: (2) then gives the correction
alone (`answer`, `Boundary.hint`), and after (3) `predict`, or `Boundary.answer` and `hear`, give
the gradient at z_n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
from torch import Tensor, nn

from treeprop_ray.core import factor
from treeprop_ray.core.objective import correction_by_product, correction_of
from treeprop_ray.core.rng import derive, draws, normal_rows
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Node, Tree

Run = Callable[..., Tensor]  # runs a block (under autocast, on the right device)
Back = Callable[[Tensor, Tensor, Tensor], None]  # backward from (output, its slope) to the leaf
Scale = Callable[[], float]  # the factor on all losses (fp16)


def unscaled() -> float:
    """Losses as they are."""
    return 1.0


def at_once(out: Tensor, slope: Tensor, leaf: Tensor) -> None:
    """Backward through a block: gradients of its weights and of `leaf`, its input."""
    out.backward(slope)


@dataclass
class Saved:
    """What a node keeps between forward and backward of one piece."""

    z_l: Tensor
    mu_fwd: Tensor  # with the graph of f_left: the only graph that is kept
    gradient: Tensor | None = None  # d(right loss or ce)/d(mu_fwd), unweighted
    at_sample: Tensor | None = None  # d(weighted right loss or ce)/d(z_n), if it is at z_n
    correction: Tensor | None = None
    adj_r: Tensor | None = None
    own_slope: Tensor | None = None  # d(weighted own)/d(mu_fwd)


@dataclass
class Losses:
    """A node's unweighted terms: one value for each piece of a step."""

    pieces: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        self.pieces.setdefault(name, []).append(value.detach())

    @property
    def terms(self) -> dict[str, Tensor]:
        """The sums over pieces, one after the other."""
        return {name: reduce(torch.add, values) for name, values in self.pieces.items()}

    def take(self) -> dict[str, Tensor]:
        taken, self.pieces = self.terms, {}
        return taken

    def take_pieces(self) -> dict[str, tuple[Tensor, ...]]:
        taken, self.pieces = self.pieces, {}
        return {name: tuple(values) for name, values in taken.items()}


def pull_back(
    out: Tensor, slope: Tensor, leaf: Tensor, weight: float, back: Back = at_once
) -> Tensor:
    """The gradient at `leaf` of a loss with gradient `slope` at `out`, through the block between.

    With weight > 0 the block's parameters get weight times their gradient on the way.
    """
    if weight == 0:
        return torch.autograd.grad(out, leaf, slope)[0]
    back(out, slope if weight == 1 else weight * slope, leaf)
    if leaf.grad is None:
        raise RuntimeError("the block gives no gradient to its input (it is cut off inside)")
    return leaf.grad if weight == 1 else leaf.grad / weight


def square(x: Tensor) -> Tensor:
    """Squared norm."""
    flat = factor.full(x).flatten()
    return torch.dot(flat, flat)


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Sum of two tensors that may be absent."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


class TreeNode:
    """One node: the blocks of its two edges (the right one is absent on the spine)."""

    def __init__(
        self,
        tree: Tree,
        node: Node,
        left: nn.Module,
        right: nn.Module | None,
        rule: Rule,
        stem_trains: bool,
        run: Run,
        back: Back = at_once,
        scale: Scale = unscaled,
    ) -> None:
        self.tree, self.node, self.rule, self.run, self.back = tree, node, rule, run, back
        self.scale = scale
        self.left, self.right = left, right
        self.draws = {"left": draws(left), "right": right is not None and draws(right)}
        self.wants_adj_l = rule.sends_left(node, stem_trains)
        self.wants_adj_r = rule.sends_right(tree, node)
        self.sigma = factor.sigma_at(rule.sigma, node.level, tree.depth, rule.noise_schedule)
        self.own_weight, _ = rule.node_weight(node)
        self.right_weight = rule.right_weight(tree, node)
        self.at_sample = rule.at_sample(tree, node)
        self.gain = rule.gain
        # the graph of a node with children waits for their adjoints; that of others is used at once
        waits = rule.recompute and not node.is_leaf
        self.lifts = partial(run, recompute=left) if waits else run
        self.losses = Losses()
        self.sizes = Losses()  # squared norms of beta * correction and of mu_fwd
        self.saved: dict[int, Saved] = {}

    def lift(self, z_l: Tensor, piece: Piece) -> Tensor:
        """Step 1. Returns mu_fwd."""
        z_l = z_l.detach().requires_grad_(self.wants_adj_l)
        mu_fwd = self.lifts(self.left, z_l, self._key("left", piece))
        self.saved[piece.index] = Saved(z_l, mu_fwd)
        return mu_fwd.detach()

    def answer(self, z_r: Tensor, piece: Piece) -> None:
        """Step 2 for r < N: right loss, its backward through f_right, the correction."""
        rule, saved = self.rule, self.saved[piece.index]
        if rule.beta == 0 and (self.right_weight == 0 or self.at_sample):
            return
        leaf, z_r_hat = self._predicted(saved.mu_fwd, piece)
        if rule.beta > 0 and rule.by_product:
            error = (z_r - z_r_hat).detach()
            (product,) = torch.autograd.grad(z_r_hat, leaf, error, retain_graph=True)
            saved.correction = correction_by_product(product, rule, leaf.detach())
        if not self.at_sample:
            saved.gradient = self._right_loss(z_r, z_r_hat, leaf, piece)
        if rule.beta == 0 or saved.correction is not None:
            return
        if saved.gradient is None:  # the loss comes later, at z_n
            slopes = factor.divergence_slopes(
                z_r.detach(), z_r_hat.detach(), rule.kind, self.scale() * piece.share(z_r)
            )
            gradient = pull_back(z_r_hat, slopes[2].to(z_r_hat.dtype), leaf, 0)
        elif rule.reduction == "mean":
            gradient = saved.gradient
        else:
            gradient = saved.gradient * (piece.share(z_r) / rule.share(z_r, piece))
        saved.correction = self._correction(gradient, 1, leaf.detach())

    def predict(self, z_n: Tensor, z_r: Tensor, piece: Piece) -> None:
        """input=sample, after step 3: right loss of f_right(z_n) and its backward."""
        leaf, z_r_hat = self._predicted(z_n, piece)
        self.hear(self._right_loss(z_r, z_r_hat, leaf, piece), piece)

    def hear(self, gradient: Tensor, piece: Piece) -> None:
        """The gradient of the right-hand loss at z_n."""
        weight = self.right_weight
        self.saved[piece.index].at_sample = gradient if weight == 1 else weight * gradient

    def _predicted(self, state: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """A leaf with the value of `state`, and f_right of it."""
        assert self.right is not None
        leaf = state.detach().requires_grad_()
        return leaf, self.run(self.right, leaf, self._key("right", piece))

    def _right_loss(self, z_r: Tensor, z_r_hat: Tensor, leaf: Tensor, piece: Piece) -> Tensor:
        """Right loss with its backward through f_right; returns its gradient at `leaf`."""
        scale, weight = self.scale(), self.right_weight
        loss, at_z_r, at_hat = factor.divergence_slopes(
            z_r.detach(), z_r_hat.detach(), self.rule.kind, scale * self.rule.share(z_r, piece)
        )
        self.losses.add("right", loss / scale)
        if self.wants_adj_r and weight > 0:
            self.saved[piece.index].adj_r = at_z_r if weight == 1 else weight * at_z_r
        return pull_back(z_r_hat, at_hat.to(z_r_hat.dtype), leaf, weight, self.back)

    def receive(self, gradient: Tensor, piece: Piece, counted: float = 1) -> None:
        """Step 2 on the spine: the head's answer d(ce)/d(mu_fwd); `vjp` also asks how many labels
        of the batch it is the mean of."""
        saved = self.saved[piece.index]
        if not self.at_sample:
            saved.gradient = gradient
        if self.rule.beta > 0:
            saved.correction = self._correction(gradient, counted, saved.mu_fwd.detach())

    def settle(self, piece: Piece) -> Tensor:
        """Step 3. Returns z_n."""
        rule, saved = self.rule, self.saved[piece.index]
        mu_fwd = saved.mu_fwd.detach()
        mu = factor.posterior_mean(mu_fwd, saved.correction, rule.alpha, rule.beta, rule.kind)
        if saved.correction is not None:
            self.sizes.add("correction", rule.beta**2 * square(saved.correction))
            self.sizes.add("mu_fwd", square(mu_fwd))
        if self.own_weight > 0 and (mu is not mu_fwd or rule.kind == "bce"):  # else own is 0
            own, at_mu, at_fwd = factor.divergence_slopes(
                mu, mu_fwd, rule.kind, self.scale() * rule.share(mu_fwd, piece)
            )
            self.losses.add("own", own / self.scale())
            slope = at_fwd.add_(at_mu, alpha=self.gain) if rule.target_gradient else at_fwd
            saved.own_slope = slope if self.own_weight == 1 else self.own_weight * slope
        if self.sigma == 0:
            return mu
        eps = normal_rows(mu, piece.places, rule.seed, "noise", piece.step, self.node.n)
        return (mu + self.sigma * eps).to(mu.dtype)

    def backward(self, adj_n: Tensor | None, piece: Piece) -> tuple[Tensor | None, Tensor | None]:
        """Step 4. Fills the gradients of f_left; returns the adjoints of z_l and z_r.

        The gradient at mu_fwd has three parts: the adjoint of z_n times d(mu)/d(mu_fwd), the own
        term, and the right-hand loss (which is in the adjoint if it is at z_n).
        """
        saved = self.saved.pop(piece.index)
        adj_n = add(adj_n, saved.at_sample)
        total = None
        if adj_n is not None:
            total = adj_n if self.gain == 1 else self.gain * adj_n
        total = add(total, saved.own_slope)
        if saved.gradient is not None and self.right_weight > 0:
            weight = self.right_weight
            total = add(total, saved.gradient if weight == 1 else weight * saved.gradient)
        if total is not None and saved.mu_fwd.requires_grad:  # else nothing up to here trains
            self.back(saved.mu_fwd, total.to(saved.mu_fwd.dtype), saved.z_l)
        return saved.z_l.grad, saved.adj_r

    def _correction(self, gradient: Tensor, counted: float, mu_fwd: Tensor) -> Tensor:
        """From the gradient of the right-hand loss; of the loss itself where that is scaled."""
        scale = self.scale()
        gradient = gradient if scale == 1 else factor.full(gradient) / scale
        return correction_of(gradient, self.rule, counted, mu_fwd)

    def _key(self, side: str, piece: Piece) -> int | None:
        """Seed for randomness inside a block (dropout), if there may be any."""
        if not self.draws[side]:
            return None
        return derive(self.rule.seed, "block", piece.step, self.node.n, side, piece.index)
