"""Networks: stem, blocks and head. Nothing about training."""

from __future__ import annotations

import torch

from treeprop_ray.config import OWN, Settings, dotted, family_of, imported
from treeprop_ray.core.network import STEM, Blueprint, Shape
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.models import gpt, mlp, vit

MODELS = {"mlp": mlp.blueprint, "vit": vit.blueprint, "gpt": gpt.blueprint}


def blueprint(settings: Settings, shape: Shape) -> Blueprint:
    """How to make each part of the network that the settings name, for data of this shape.

    `model.name=package.module:factory` calls factory(settings.model, shape), which gives a
    Blueprint.
    """
    name = settings.model.name
    if name == OWN:
        raise UserError(
            f"model.name={name}: a network given to fit; only the program that made it can build it"
        )
    if not dotted(name):
        make = MODELS[name]
        return make(settings.model, shape.input_shape, shape.classes, family_of(settings))
    recipe = imported("model.name", name)(settings.model, shape)
    if not isinstance(recipe, Blueprint):
        raise UserError(f"model.name={name}: must give a Blueprint, not {type(recipe).__name__}")
    with torch.device("meta"):  # a module that two parts share would be trained twice
        recipe.build_all([STEM, *Tree(recipe.N, settings.split).blocks], 0)
    return recipe
