"""Recurrent cells of a user's own, right and wrong ones, for `model.name=own_cells:<factory>`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.config import Model


class Gated(nn.Module):
    """Keeps the state or takes a candidate."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs + hidden, hidden)
        self.new = nn.Linear(inputs, hidden)
        self.unused = nn.Parameter(torch.zeros(2))
        self.still = nn.Parameter(torch.ones(hidden), requires_grad=False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        keep = torch.sigmoid(self.gate(torch.cat([x, h], 1)))
        return self.still * torch.lerp(torch.tanh(self.new(x)), h, keep)


def gated(model: Model, inputs: int) -> nn.Module:
    return Gated(inputs, model.hidden)


class Wrong(nn.Module):
    """A GRU cell and something that a cell must not do."""

    def __init__(self, model: Model, inputs: int, fault: str) -> None:
        super().__init__()
        self.cell, self.fault = nn.GRUCell(inputs, model.hidden), fault
        self.norm = nn.BatchNorm1d(model.hidden)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        after = self.cell(x, h)
        if self.fault == "pair":
            return after, after
        if self.fault == "width":
            return after[:, :-1]
        if self.fault == "dropout":
            return nn.functional.dropout(after)
        if self.fault == "place":
            return h.add_(after.detach()) + after
        if self.fault == "batch":
            return self.norm(after)
        return after.detach()


def pair(model: Model, inputs: int) -> nn.Module:
    return Wrong(model, inputs, "pair")


def width(model: Model, inputs: int) -> nn.Module:
    return Wrong(model, inputs, "width")


def dropout(model: Model, inputs: int) -> nn.Module:
    return Wrong(model, inputs, "dropout")


def place(model: Model, inputs: int) -> nn.Module:
    return Wrong(model, inputs, "place")


def batch(model: Model, inputs: int) -> nn.Module:
    return Wrong(model, inputs, "batch")


def cut(model: Model, inputs: int) -> nn.Module:
    return Wrong(model, inputs, "cut")


def narrow(model: Model, inputs: int) -> nn.Module:
    return nn.GRUCell(inputs + 1, model.hidden)


def number(model: Model, inputs: int) -> int:
    return inputs
