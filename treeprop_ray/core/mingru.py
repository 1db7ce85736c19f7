"""minGRU: a GRU whose gate and candidate read the input alone (Feng et al., 2024).

h' = (1 - z) h + z c with z = sigmoid(W_z x + b_z), c = W_c x + b_c is linear in h, so a scan goes
over a whole sequence in log2 N rounds, forward and backward: a baseline that needs no tree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray.core.cells import like
from treeprop_ray.core.scan import scan


class MinGRUCell(nn.Module):
    """Gate and candidate in one linear layer, initialised as torch.nn.Linear."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs, self.hidden = inputs, hidden
        self.weight = nn.Parameter(torch.empty(2 * hidden, inputs))
        self.bias = nn.Parameter(torch.empty(2 * hidden))
        for p in self.parameters():
            nn.init.uniform_(p, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def project(self, x: Tensor) -> Tensor:
        """Gate (before its sigmoid) and candidate."""
        return F.linear(x, self.weight, self.bias)

    def advance(self, p: Tensor, h: Tensor) -> Tensor:
        """The next state."""
        gate, candidate = like(p, h).chunk(2, -1)
        return torch.lerp(h, candidate, torch.sigmoid(gate))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step."""
        return self.advance(self.project(x), h)

    def last(self, x_BNS: Tensor) -> Tensor:
        """h_N of whole sequences, from h_0 = 0, by a scan."""
        gate, candidate = like(self.project(x_BNS), x_BNS).chunk(2, -1)
        z = torch.sigmoid(gate)
        return scan(1 - z, z * candidate)[:, -1]
