"""The perceptron of the MNIST experiments: inputs-H-…-H-classes, no residuals, no norms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

from treeprop_ray.core.network import Blueprint

if TYPE_CHECKING:
    from treeprop_ray.config import Model

ACTIVATIONS = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


def blueprint(model: Model, input_shape: tuple[int, ...], classes: int, family: str) -> Blueprint:
    """N = blocks + 1 layers: the first maps the flat input to H, the head maps H to the classes."""
    width = math.prod(input_shape)
    hidden, activation = model.hidden, ACTIVATIONS[model.activation]

    def linear(inputs: int, outputs: int) -> nn.Linear:
        layer = nn.Linear(inputs, outputs)
        if model.init == "xavier":
            nn.init.xavier_uniform_(layer.weight, model.gain)
            nn.init.zeros_(layer.bias)
        return layer

    def block(l: int, r: int) -> nn.Module:
        return nn.Sequential(linear(width if l == 0 else hidden, hidden), activation())

    return Blueprint(
        N=model.blocks + 1,
        stem=nn.Flatten,
        block=block,
        head=lambda: linear(hidden, classes),
        family=family,
    )
