"""The terms a node trains on, and the whole objective in one graph.

Terms of a node (l, n, r), all means over the elements of the whole batch:
    own    divergence of the factor's mean mu from its forward transition mu_fwd
    right  divergence of z_r from its prediction z_r_hat (r < N)
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


def node_loss(mu_q: Tensor, mu_p: Tensor, family: str, piece: Piece) -> Tensor:
    """Divergence of two means: the piece's sum over the number of elements of the whole batch."""
    return factor.divergence(mu_q, mu_p, family) * piece.share(mu_p)


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


def correction_of(gradient: Tensor, rule: Rule, counted: float) -> Tensor:
    """The correction from the gradient of the node's mean-reduced right-hand loss.

    `mean`: the negative gradient; the factor mc_samples undoes the division by the number of
    copies of a sample. `vjp` at the head: the negative gradient of the summed loss of the `counted`
    labels; of cross-entropy that is J^T (onehot - softmax).
    """
    if rule.correction == "mean":
        return -rule.correction_scale * rule.mc_samples * gradient
    return -rule.correction_scale * counted * gradient


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
    own_weight, right_weight = rule.node_weight
    labels = loss.counted(rule.loss, y)

    def boundary(index: int) -> Tensor:
        return z[index].detach() if rule.detach_levels and index != 0 else z[index]

    for level in range(1, tree.depth + 1):
        for node in tree.level(level):
            spine = tree.is_spine(node)
            mu_fwd = next_state(network.block(node.left), boundary(node.l), context)
            right_block = network.block(node.right)
            if spine:
                right = head_loss(right_block, mu_fwd, y, piece, rule.loss)
                weight = rule.ce_weight(tree, node)
            else:
                z_r = boundary(node.r)
                z_r_hat = next_state(right_block, mu_fwd, context)
                target = z_r if rule.target_gradient else z_r.detach()
                right = node_loss(target, z_r_hat, rule.family, piece)
                weight = right_weight
            correction = None
            if rule.beta > 0:
                if rule.correction == "vjp" and not spine:
                    error = (z_r - z_r_hat).detach()
                    (product,) = torch.autograd.grad(z_r_hat, mu_fwd, error, retain_graph=True)
                    correction = rule.correction_scale * product
                else:
                    (gradient,) = torch.autograd.grad(right, mu_fwd, retain_graph=True)
                    correction = correction_of(gradient, rule, labels)
            mu = factor.posterior_mean(mu_fwd, correction, rule.alpha, rule.beta, rule.family)
            sigma = factor.sigma_at(rule.sigma, level, tree.depth, rule.noise_schedule)
            z[node.n] = mu
            if sigma > 0:
                eps = normal_rows(mu, piece.places, rule.seed, "noise", piece.step, node.n)
                z[node.n] = mu + sigma * eps
            target = mu if rule.target_gradient else mu.detach()
            own = node_loss(target, mu_fwd, rule.family, piece)
            objective = objective + own_weight * own + weight * right
            terms[node.n] = {"own": own.detach(), "ce" if spine else "right": right.detach()}
    return objective, terms
