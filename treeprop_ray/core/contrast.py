"""The contrastive loss with margin of one layer (CFF+M), and the margin of every layer.

Shapes: M rows (both views of a batch), T tokens, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from treeprop_ray.core.factor import full


def margin_at(layer: int, layers: int, kind: str, m0: float, mL: float) -> float:
    """Margin of layer 0 … layers - 1, from m0 at the first to mL at the last."""
    u = layer / (layers - 1) if layers > 1 else 0.0
    if kind == "linear":
        return m0 + (mL - m0) * u
    if kind == "parabolic":
        return (m0 - mL) * (1 - u) ** 2 + mL
    return mL + (m0 - mL) * (1 + math.cos(math.pi * u)) / 2


def embed(out: Tensor) -> Tensor:
    """z_i: a layer's output, averaged over tokens if it has them, at length 1."""
    out = full(out)
    pooled_MD = out.mean(1) if out.dim() == 3 else out.flatten(1)
    return F.normalize(pooled_MD, dim=-1)


def contrastive_loss(
    out: Tensor, labels: Tensor, margin: float, tau: float
) -> tuple[Tensor, Tensor]:
    """(mean loss, share of positive pairs on which the clamp acts) of a layer's output.

    s_ij = z_i·z_j; t_ij = min(s_ij + margin, 1) for a pair of one label, s_ij for any other;
    loss_i = -mean over positives j of (t_ij / tau - log sum_{k != i} exp(t_ik / tau)), and 0 for a
    row without positives.
    """
    z_MD = embed(out)
    s_MM = z_MD @ z_MD.T
    same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    raised = s_MM + margin
    t_MM = torch.where(same, raised.clamp(max=1), s_MM) / tau
    log_sum = t_MM.masked_fill(itself, -math.inf).logsumexp(1)
    positive = same & ~itself
    count = positive.sum(1)
    drawn_in = (t_MM * positive).sum(1) - count * log_sum
    clamped = ((raised.detach() > 1) & positive).sum() / count.sum().clamp(min=1)
    return -(drawn_in / count.clamp(min=1)).mean(), clamped
