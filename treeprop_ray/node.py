"""What a tree node computes: its forward step, and its backward step from explicit adjoints.

A node never sees another node's autograd graph. Tensors come in and go out detached:

    lift     (1)  mu_fwd = f_left(z_l)
    answer   (2)  g = d(right loss)/d(mu_fwd); the right block does its own backward here, once
    settle   (3)  mu = alpha * mu_fwd + beta * correction(g),  z_n = mu + sigma_s * eps
    backward (4)  from the adjoint of z_n (sum over its consumers): gradients of f_left,
                  and adjoints for z_l and z_r

At a spine node (2) is the head's business (`Boundary.answer`); the rest is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from treeprop_ray import factor
from treeprop_ray.objective import correction_of, head_loss, mean_over_batch
from treeprop_ray.rng import derive, normal_rows
from treeprop_ray.rule import Piece, Rule
from treeprop_ray.tree import Node, Tree

Run = Callable[..., Tensor]  # runs a block (under autocast, on the right device)


@dataclass
class Saved:
    """What a node keeps between forward and backward of one piece."""

    z_l: Tensor
    mu_fwd: Tensor  # with the graph of f_left
    gradient: Tensor | None = None  # d(right loss or ce)/d(mu_fwd), unweighted
    correction: Tensor | None = None
    adj_r: Tensor | None = None
    mu_leaf: Tensor | None = None  # mu_fwd as a leaf of the small graph of step 3
    mu: Tensor | None = None
    own: Tensor | None = None


@dataclass
class Losses:
    """Running sums of a node's unweighted terms over the pieces of a step."""

    terms: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach()
        self.terms[name] = self.terms[name] + value if name in self.terms else value

    def take(self) -> dict[str, Tensor]:
        taken, self.terms = self.terms, {}
        return taken


def gradient_at(loss: Tensor, leaf: Tensor, weight: float) -> Tensor:
    """d(loss)/d(leaf); with weight > 0 the parameters behind `loss` get weight * gradient too."""
    if weight == 0:
        return torch.autograd.grad(loss, leaf)[0]
    loss.backward(torch.full_like(loss, weight))
    assert leaf.grad is not None
    return leaf.grad if weight == 1 else leaf.grad / weight


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
    ) -> None:
        self.tree, self.node, self.rule, self.run = tree, node, rule, run
        self.left, self.right = left, right
        self.wants_adj_l = rule.sends_left(node, stem_trains)
        self.wants_adj_r = rule.sends_right(tree, node)
        self.sigma = factor.sigma_at(rule.sigma, node.level, tree.depth, rule.noise_schedule)
        self.own_weight, right_weight = rule.node_weight
        self.right_weight = rule.ce_weight(tree, node) if tree.is_spine(node) else right_weight
        self.losses = Losses()
        self.saved: dict[int, Saved] = {}

    def forward(self, z_l: Tensor, z_r: Tensor | None, piece: Piece) -> Tensor:
        """Steps 1-3 of an inner node."""
        self.lift(z_l, piece)
        assert z_r is not None
        self.answer(z_r, piece)
        return self.settle(piece)

    def lift(self, z_l: Tensor, piece: Piece) -> Tensor:
        """Step 1. Returns mu_fwd."""
        z_l = z_l.detach().requires_grad_(self.wants_adj_l)
        mu_fwd = self.run(self.left, z_l, self._key("left", piece))
        self.saved[piece.index] = Saved(z_l, mu_fwd)
        return mu_fwd.detach()

    def answer(self, z_r: Tensor, piece: Piece) -> None:
        """Step 2 for r < N: right loss, its backward through f_right, the correction."""
        rule, saved = self.rule, self.saved[piece.index]
        if self.right_weight == 0 and rule.beta == 0:
            return
        assert self.right is not None
        leaf = saved.mu_fwd.detach().requires_grad_()
        z_r = z_r.detach().requires_grad_(self.wants_adj_r and self.right_weight > 0)
        z_r_hat = self.run(self.right, leaf, self._key("right", piece))
        if rule.beta > 0 and rule.correction == "vjp":
            error = (z_r - z_r_hat).detach()
            (product,) = torch.autograd.grad(z_r_hat, leaf, error, retain_graph=True)
            saved.correction = rule.correction_scale * product
        loss = mean_over_batch(factor.divergence(z_r, z_r_hat, rule.family), piece)
        self.losses.add("right", loss)
        saved.gradient = gradient_at(loss, leaf, self.right_weight)
        saved.adj_r = z_r.grad  # already weighted
        if rule.beta > 0 and saved.correction is None:
            saved.correction = correction_of(saved.gradient, rule, piece.total)

    def receive(self, gradient: Tensor, piece: Piece) -> None:
        """Step 2 on the spine: the head's answer d(ce)/d(mu_fwd)."""
        saved = self.saved[piece.index]
        saved.gradient = gradient
        if self.rule.beta > 0:
            saved.correction = correction_of(gradient, self.rule, piece.total)

    def settle(self, piece: Piece) -> Tensor:
        """Step 3. Returns z_n."""
        rule, saved = self.rule, self.saved[piece.index]
        leaf = saved.mu_fwd.detach().requires_grad_()
        mu = factor.posterior_mean(leaf, saved.correction, rule.alpha, rule.beta, rule.family)
        saved.mu_leaf, saved.mu = leaf, mu
        if self.own_weight > 0 and mu is not leaf:  # else mu = mu_fwd and own is 0
            target = mu if rule.target_gradient else mu.detach()
            own = mean_over_batch(factor.divergence(target, leaf, rule.family), piece)
            self.losses.add("own", own)
            saved.own = self.own_weight * own
        z_n = mu.detach()
        if self.sigma > 0:
            eps = normal_rows(z_n, piece.places, rule.seed, "noise", piece.step, self.node.n)
            z_n = (z_n + self.sigma * eps).to(z_n.dtype)
        return z_n

    def backward(self, adj_n: Tensor | None, piece: Piece) -> tuple[Tensor | None, Tensor | None]:
        """Step 4. Fills the gradients of f_left; returns the adjoints of z_l and z_r."""
        saved = self.saved.pop(piece.index)
        leaf, mu = saved.mu_leaf, saved.mu
        assert leaf is not None and mu is not None
        if adj_n is not None and mu.requires_grad:
            roots, seeds = [mu], [adj_n.to(mu.dtype)]
            if saved.own is not None and saved.own.requires_grad:
                roots, seeds = [mu, saved.own], [*seeds, torch.ones_like(saved.own)]
            torch.autograd.backward(roots, seeds)
        elif saved.own is not None and saved.own.requires_grad:
            saved.own.backward()
        total = leaf.grad
        if saved.gradient is not None and self.right_weight > 0:
            weighted = saved.gradient if self.right_weight == 1 else self.right_weight * saved.gradient
            total = weighted if total is None else total + weighted
        if total is not None:
            saved.mu_fwd.backward(total.to(saved.mu_fwd.dtype))
        return saved.z_l.grad, saved.adj_r

    def _key(self, side: str, piece: Piece) -> int:
        """Seed for randomness inside a block (dropout)."""
        return derive(self.rule.seed, "block", piece.step, self.node.n, side, piece.index)


class Boundary:
    """Both ends of the chain: stem, head and the labels."""

    def __init__(self, tree: Tree, stem: nn.Module, head: nn.Module, rule: Rule, run: Run) -> None:
        self.tree, self.stem, self.head, self.rule, self.run = tree, stem, head, rule, run
        self.stem_trains = any(p.requires_grad for p in stem.parameters())
        self.z_0: dict[int, Tensor] = {}
        self.labels: dict[int, Tensor] = {}
        self.losses: dict[int, Losses] = {node.n: Losses() for node in tree.spine}

    def open(self, x: Tensor, y: Tensor, piece: Piece) -> Tensor:
        """z_0 = stem(x); keep the labels for the head."""
        self.labels[piece.index] = y
        seed = derive(self.rule.seed, "block", piece.step, 0, "stem", piece.index)
        z_0 = self.run(self.stem, x, seed)
        if self.stem_trains:
            self.z_0[piece.index] = z_0
        return z_0.detach()

    def answer(self, n: int, mu_fwd: Tensor, piece: Piece) -> Tensor:
        """Cross-entropy of head(mu_fwd) and its backward, at once. Returns d(ce)/d(mu_fwd)."""
        leaf = mu_fwd.detach().requires_grad_()
        seed = derive(self.rule.seed, "block", piece.step, n, "head", piece.index)
        labels = self.labels[piece.index]
        loss = self.run(lambda z: head_loss(self.head, z, labels, piece), leaf, seed)
        self.losses[n].add("ce", loss)
        return gradient_at(loss, leaf, self.rule.ce_weight(self.tree, self.tree.nodes[n]))

    def close(self, adj_0: Tensor | None, piece: Piece) -> None:
        """Backward of the stem."""
        z_0 = self.z_0.pop(piece.index)
        if adj_0 is not None:
            z_0.backward(adj_0)
