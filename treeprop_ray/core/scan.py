"""A linear recurrence over all positions at once."""

from __future__ import annotations

import torch
from torch import Tensor


def scan(a_BNH: Tensor, b_BNH: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t for all t, from h = 0, in log2 N rounds of sums and products."""
    a, b, step = a_BNH, b_BNH, 1
    while step < b.shape[1]:
        behind = torch.addcmul(b[:, step:], a[:, step:], b[:, :-step])
        b = torch.cat((b[:, :step], behind), 1)
        a = torch.cat((a[:, :step], a[:, step:] * a[:, :-step]), 1)
        step *= 2
    return b
