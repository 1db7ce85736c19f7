"""Networks: stem, blocks and head. Nothing about training."""

from __future__ import annotations

import torch

from treeprop_ray.config import OWN, Settings, dotted, family_of, imported
from treeprop_ray.core.grouping import grouping_of
from treeprop_ray.core.network import STEM, Blueprint, Shape
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError, first_line, place_of
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
        recipe = make(settings.model, shape.input_shape, shape.classes, family_of(settings))
        return grouped(settings, recipe)
    factory = imported("model.name", name)
    try:
        recipe = factory(settings.model, shape)
        if isinstance(recipe, Blueprint):
            with torch.device("meta"):  # a module that two parts share would be trained twice
                recipe.build_all([STEM, *Tree(recipe.N, settings.split).blocks], 0)
    except UserError:
        raise
    except Exception as e:  # the user's own code may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}{place_of(e)}"
        raise UserError(f"model.name={name}: {reason}") from e
    if not isinstance(recipe, Blueprint):
        raise UserError(f"model.name={name}: must give a Blueprint, not {type(recipe).__name__}")
    return grouped(settings, recipe)


def grouped(settings: Settings, recipe: Blueprint) -> Blueprint:
    """The network with as many layers in a block as the settings say."""
    return recipe.grouped(grouping_of(settings.model, recipe.N - 1, settings.split))
