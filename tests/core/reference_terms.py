"""What the objective in reference.py is made of: distances, their reductions, the correction."""

from typing import Any

import torch
from torch import Tensor, nn


def through(p: Tensor, least: float = 1e-6) -> Tensor:
    """Kept inside (least, 1 - least); the gradient passes."""
    return p + (p.clamp(least, 1 - least) - p).detach()


def distance(q: Tensor, p: Tensor, o: dict[str, Any]) -> Tensor:
    """Of two means, element by element."""
    if o["family"] == "gaussian":
        return (q - p).pow(2)
    q, p = through(q), through(p)
    crossed = -q * torch.log(p) - (1 - q) * torch.log(1 - p)
    entropy = -q * torch.log(q) - (1 - q) * torch.log(1 - q)
    return crossed if o["bernoulli"] == "literal" else crossed - entropy


def reduced(d: Tensor, o: dict[str, Any]) -> Tensor:
    """Mean over all elements; or the KL: its sum for a label, q with half the variance of p."""
    if o["reduction"] == "mean":
        return d.mean()
    each = d.sum() / (len(d) * o["labels_per_sample"])
    return each / (2 * 2 * o["sigma"] ** 2) if o["family"] == "gaussian" else each


def push_of(
    o: dict[str, Any], mu_fwd: Tensor, hat: Tensor, z_r: Tensor | None, y: Tensor
) -> Tensor:
    """The correction; z_r is None where the right end is the label."""
    mean = nn.functional.cross_entropy(hat, y) if z_r is None else distance(z_r, hat, o).mean()
    ascent = -torch.autograd.grad(mean, mu_fwd, retain_graph=True)[0]
    if z_r is None:
        product = ascent * len(y)
    else:
        product = torch.autograd.grad(hat, mu_fwd, (z_r - hat).detach(), retain_graph=True)[0]
    scale = o["correction_scale"]
    if o["correction"] == "mean":
        return scale * o["mc_samples"] * ascent
    if o["correction"] == "vjp":
        return scale * product
    push = ascent if o["correction"] == "normalised" else product
    long, longest = (t.detach().pow(2).sum(1, keepdim=True).sqrt() for t in (push, scale * mu_fwd))
    cut = long > (0 if o["correction"] == "normalised" else longest)
    return torch.where(cut, push * longest / long, push)
