"""Networks: stem, blocks and head. Nothing about training."""

from __future__ import annotations

from treeprop_ray.config import Model, Settings, family_of
from treeprop_ray.core.network import Blueprint, Shape
from treeprop_ray.models import gpt, mlp, vit

MODELS = {"mlp": mlp.blueprint, "vit": vit.blueprint, "gpt": gpt.blueprint}


def blueprint(settings: Settings, shape: Shape) -> Blueprint:
    """How to make each part of the network that the settings name, for data of this shape."""
    make = MODELS[settings.model.name]
    return make(settings.model, shape.input_shape, shape.classes, family_of(settings))


def count_blocks(model: Model) -> int:
    """N of a shipped network: its blocks and the head, which may hold the last of them."""
    return model.blocks + (0 if model.output_block else 1)
