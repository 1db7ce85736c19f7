"""The terms a node trains on, and the whole objective in one graph.

Terms of a node (l, n, r), all means over the elements of the whole batch (or nats per label,
reduction=sigma):
    own    divergence of the factor's mean mu from its forward transition mu_fwd
    right  divergence of z_r from its prediction z_r_hat (r < N), from mu_fwd or from z_n
    ce     cross-entropy, or another loss, of the head's prediction (r = N: spine nodes only)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treeprop_ray.core import factor, loss
from treeprop_ray.core.rng import normal_rows
from treeprop_ray.core.rule import LossRule, Piece, Rule
from treeprop_ray.core.states import next_state, split_stem

if TYPE_CHECKING:
    from treeprop_ray.core.network import TreeNetwork

PLAIN = LossRule()


def node_loss(mu_q: Tensor, mu_p: Tensor, rule: Rule, piece: Piece) -> Tensor:
    """Divergence of two means: the piece's share of that of the whole batch."""
    return factor.divergence(mu_q, mu_p, rule.kind) * rule.share(mu_p, piece)


def head_loss(
    head: nn.Module,
    state: Tensor,
    labels: Tensor,
    piece: Piece,
    rule: LossRule = PLAIN,
    counted: float | Tensor | None = None,
) -> Tensor:
    """Loss of head(state), mean over those labels of the whole batch that count.

    `counted` is their number (`loss.counted`); a piece that is the whole batch needs none. A head
    may bring its own `loss_sum(state, labels)` (e.g. in chunks over a large vocabulary): summed
    cross-entropy without labels of -100.
    """
    if loss.plain_head(rule, head, "loss_sum"):
        total: Tensor = head.loss_sum(state, labels)  # type: ignore[operator]
    else:
        total = loss.total(rule, head(state), labels)
    if counted is None:
        assert piece.stop - piece.start == piece.total
        counted = loss.counted(rule, labels)
    return total / (counted if isinstance(counted, Tensor) else counted or 1)


def correction_of(gradient: Tensor, rule: Rule, counted: float, mu_fwd: Tensor) -> Tensor:
    """The correction from the gradient of the node's mean-reduced right-hand loss.

    `mean`: the negative gradient; the factor mc_samples undoes the division by the number of
    copies of a sample. `normalised`: its direction, for each sample as long as correction_scale
    times mu_fwd. At the head `vjp` and `clipped` begin with the negative gradient of the summed
    loss of the `counted` labels; of cross-entropy that is J^T (onehot - softmax).
    """
    if rule.correction == "mean":
        return -rule.correction_scale * rule.mc_samples * gradient
    if rule.correction == "normalised":
        return factor.sized(-gradient, mu_fwd, rule.correction_scale, longer=True)
    return correction_by_product(-counted * gradient, rule, mu_fwd)


def correction_by_product(product: Tensor, rule: Rule, mu_fwd: Tensor) -> Tensor:
    """From J^T (z_r - z_r_hat): `vjp` as it is, `clipped` for each sample at most as long as
    correction_scale times mu_fwd."""
    if rule.correction == "clipped":
        return factor.sized(product, mu_fwd, rule.correction_scale, longer=False)
    return rule.correction_scale * product


def tree_objective(
    network: TreeNetwork, rule: Rule, x: Tensor, y: Tensor, piece: Piece
) -> tuple[Tensor, Mapping[int, Mapping[str, Tensor]]]:
    """The summed objective as one autograd graph, written straight from the definitions.

    The reference for the wave-by-wave engines (they never build this graph) and the probe's tool.
    Returns the objective and each node's unweighted terms.
    """
    tree = network.tree
    z_0, context = split_stem(network.stem(x))
    z: dict[int, Tensor] = {0: z_0}
    objective = torch.zeros((), dtype=z[0].dtype)
    terms: dict[int, dict[str, Tensor]] = {}
    labels = loss.counted(rule.loss, y)

    def boundary(index: int) -> Tensor:
        return z[index].detach() if rule.detach_levels and index != 0 else z[index]

    for level in range(1, tree.depth + 1):
        for node in tree.level(level):
            spine = tree.is_spine(node)
            mu_fwd = next_state(network.block(node.left), boundary(node.l), context)
            right_block = network.block(node.right)
            own_weight, _ = rule.node_weight(node)
            z_r = None if spine else boundary(node.r)
            correction = None
            if rule.beta > 0:
                if z_r is None:
                    mean = head_loss(right_block, mu_fwd, y, piece, rule.loss)
                    (gradient,) = torch.autograd.grad(mean, mu_fwd, retain_graph=True)
                    correction = correction_of(gradient, rule, labels, mu_fwd)
                else:
                    z_r_hat = next_state(right_block, mu_fwd, context)
                    correction = _right_correction(z_r.detach(), z_r_hat, mu_fwd, rule, piece)
                correction = correction.detach()
            mu = factor.posterior_mean(mu_fwd, correction, rule.alpha, rule.beta, rule.kind)
            sigma = factor.sigma_at(rule.sigma, level, tree.depth, rule.noise_schedule)
            z[node.n] = mu
            if sigma > 0:
                eps = normal_rows(mu, piece.places, rule.seed, "noise", piece.step, node.n)
                z[node.n] = mu + sigma * eps
            state = z[node.n] if rule.at_sample(tree, node) else mu_fwd
            if z_r is None:
                right = head_loss(right_block, state, y, piece, rule.loss)
            else:
                target = z_r if rule.target_gradient else z_r.detach()
                right = node_loss(target, next_state(right_block, state, context), rule, piece)
            target = mu if rule.target_gradient else mu.detach()
            own = node_loss(target, mu_fwd, rule, piece)
            objective = objective + own_weight * own + rule.right_weight(tree, node) * right
            terms[node.n] = {"own": own.detach(), "ce" if spine else "right": right.detach()}
    return objective, terms


def _right_correction(
    z_r: Tensor, z_r_hat: Tensor, mu_fwd: Tensor, rule: Rule, piece: Piece
) -> Tensor:
    """The correction of a node inside the tree; its loss is a mean whatever it is trained by."""
    if rule.by_product:
        (product,) = torch.autograd.grad(z_r_hat, mu_fwd, z_r - z_r_hat.detach(), retain_graph=True)
        return correction_by_product(product, rule, mu_fwd)
    mean = factor.divergence(z_r, z_r_hat, rule.kind) * piece.share(z_r_hat)
    (gradient,) = torch.autograd.grad(mean, mu_fwd, retain_graph=True)
    return correction_of(gradient, rule, 1, mu_fwd)
