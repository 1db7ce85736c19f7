"""One factor q(z_n | z_l, z_r) of the tree posterior: mean, sample and exact divergences.

Pure functions of tensors. Symbols as in the paper: mu_fwd = f_left(z_l) is the forward estimate,
z_r_hat = f_right(mu_fwd) the prediction of the right boundary, mu the posterior mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Bernoulli means stay inside (EPS, 1 - EPS), so that log-odds are finite.
EPS = 1e-6


def posterior_mean(
    mu_fwd: Tensor, correction: Tensor | None, alpha: float, beta: float, kind: str
) -> Tensor:
    """mu = alpha * mu_fwd + beta * correction.

    Bernoulli: the right side is read as an estimate of z_n itself, mu_fwd + correction, so with
    alpha + beta = 1 the mean stays a probability. `bce` (bernoulli=literal): as it stands, kept
    inside (EPS, 1 - EPS).
    """
    if kind == "bernoulli":
        if correction is None:
            return mu_fwd
        mu = torch.add(mu_fwd, correction, alpha=beta)
        return inside(mu) if mu.requires_grad else mu.clamp_(EPS, 1 - EPS)
    mu = mu_fwd if alpha == 1 else alpha * mu_fwd
    if correction is None:
        return mu
    mu = torch.add(mu, correction, alpha=beta)
    return inside(mu) if kind == "bce" else mu


def sized(push: Tensor, mu_fwd: Tensor, ratio: float, longer: bool) -> Tensor:
    """`push` with the norm ratio * |mu_fwd|, sample by sample; `longer=False`: at most that."""
    norms, limits = (full(t).flatten(1).norm(dim=1) for t in (push, mu_fwd))
    factors = torch.where(norms > 0, ratio * limits / norms, 0.0)
    if not longer:
        factors = factors.clamp(max=1)
    return push * factors.to(push.dtype).view(-1, *[1] * (push.dim() - 1))


def sigma_at(sigma: float, level: int, depth: int, schedule: str = "depth") -> float:
    """sigma_s = sigma * sqrt(2^(D - s)): an edge of 2^(D-s) steps has that much more variance."""
    return sigma * math.sqrt(2 ** (depth - level)) if schedule == "depth" else sigma


def divergence(mu_q: Tensor, mu_p: Tensor, kind: str) -> Tensor:
    """The part of KL(q || p) that depends on the means, summed over all elements.

    Gaussian: squared error. Bernoulli: the KL itself, i.e. binary cross-entropy less the entropy
    of q. The entropy is a constant unless q's side is differentiated too (target_gradient); then
    plain cross-entropy (`bce`) also rewards saturated states.
    """
    mu_q, mu_p = full(mu_q), full(mu_p)
    if kind == "bernoulli":
        return kl_bernoulli(inside(mu_q), inside(mu_p)).sum()
    if kind == "bce":
        mu_q, mu_p = inside(mu_q), inside(mu_p)
        return -(mu_q * mu_p.log() + (1 - mu_q) * (1 - mu_p).log()).sum()
    return ((mu_q - mu_p) ** 2).sum()


def divergence_slopes(
    mu_q: Tensor, mu_p: Tensor, kind: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """scale * divergence with its gradients at mu_q and mu_p written out (no graph, few passes).

    Bernoulli: d/d(mu_p) = (mu_p - mu_q) / (mu_p (1 - mu_p)), d/d(mu_q) = logit(mu_q) - logit(mu_p);
    `bce`: the same, but d/d(mu_q) = -logit(mu_p).
    """
    mu_q, mu_p = full(mu_q), full(mu_p)
    if kind == "bce":
        mu_q, mu_p = mu_q.clamp(EPS, 1 - EPS), mu_p.clamp(EPS, 1 - EPS)
        rest = 1 - mu_p
        of_zero = rest.log()
        at_q = of_zero - mu_p.log()
        value = torch.dot(mu_q.flatten(), at_q.flatten()).sub_(of_zero.sum())
        at_p = (mu_p - mu_q).div_(rest.mul_(mu_p)).mul_(scale)
        return value.mul_(scale), at_q.mul_(scale), at_p
    if kind == "bernoulli":
        mu_q, mu_p = mu_q.clamp(EPS, 1 - EPS), mu_p.clamp(EPS, 1 - EPS)
        rest = 1 - mu_p
        of_zero = (1 - mu_q).div_(rest).log_()
        at_q = (mu_q / mu_p).log_().sub_(of_zero)
        value = torch.dot(mu_q.flatten(), at_q.flatten()).add_(of_zero.sum())
        at_p = (mu_p - mu_q).div_(rest.mul_(mu_p)).mul_(scale)
        return value.mul_(scale), at_q.mul_(scale), at_p
    difference = mu_q - mu_p
    flat = difference.flatten()
    at_q = difference * (2 * scale)
    return torch.dot(flat, flat).mul_(scale), at_q, -at_q


def inside(probability: Tensor) -> Tensor:
    """Clamp into (EPS, 1 - EPS) for the value; the gradient passes as if there were no clamp."""
    return probability + (probability.clamp(EPS, 1 - EPS) - probability).detach()


def full(x: Tensor) -> Tensor:
    """Losses are computed in float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# -- exact divergences, for the bound F and the theory -----------------------------------------


def kl_gaussian(mu_q: Tensor, mu_p: Tensor, sigma_q: float, sigma_p: float) -> Tensor:
    """KL(N(mu_q, sigma_q^2) || N(mu_p, sigma_p^2)) per element."""
    ratio = (sigma_q / sigma_p) ** 2
    return 0.5 * (ratio - 1 - math.log(ratio) + (mu_q - mu_p) ** 2 / sigma_p**2)


def kl_bernoulli(pi: Tensor, rho: Tensor) -> Tensor:
    """KL(Bernoulli(pi) || Bernoulli(rho)) per element; both inside (0, 1)."""
    return pi * (pi / rho).log() + (1 - pi) * ((1 - pi) / (1 - rho)).log()


def log_normal(z: Tensor, mean: Tensor, sigma: float) -> Tensor:
    """log N(z | mean, sigma^2) per element."""
    return -0.5 * ((z - mean) / sigma) ** 2 - math.log(sigma) - 0.5 * math.log(2 * math.pi)
