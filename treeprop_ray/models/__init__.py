"""Networks: stem, blocks and head. Nothing about training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treeprop_ray.config import OWN, Settings, dotted, family_of, imported
from treeprop_ray.core.grouping import grouping_of
from treeprop_ray.core.inputs import unpacking
from treeprop_ray.core.network import STEM, Blueprint, Shape, TreeNetwork
from treeprop_ray.core.recipe import recipe_of
from treeprop_ray.core.rng import seeded
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError, first_line, place_of
from treeprop_ray.models import gpt, mlp, vit

MODELS = {"mlp": mlp.blueprint, "vit": vit.blueprint, "gpt": gpt.blueprint}


def blueprint(settings: Settings, shape: Shape) -> Blueprint:
    """How to make each part of the network that the settings name, for data of this shape.

    `model.name=package.module:factory` calls factory(settings.model, shape), which gives a
    Blueprint, or a TreeNetwork (the same in every process: what it draws comes from the seed).
    """
    name = settings.model.name
    if name == OWN:
        raise UserError(
            f"model.name={name}: a network given to fit; only the program that made it can build it"
        )
    if not dotted(name):
        if shape.form:
            raise UserError(
                f"model.name={name}: takes one tensor, samples have {shape.form}; your own "
                "network (package.module:factory) takes several"
            )
        make = MODELS[name]
        recipe = make(settings.model, shape.input_shape, shape.classes, family_of(settings))
        return grouped(settings, recipe)
    recipe = own(settings, shape)
    if isinstance(recipe, TreeNetwork):
        recipe.reads(shape.form)
        return for_inputs(of_network(settings, recipe), shape)
    try:
        if isinstance(recipe, Blueprint):
            with torch.device("meta"):  # a module that two parts share would be trained twice
                recipe.build_all([STEM, *Tree(recipe.N, settings.split).blocks], 0)
    except UserError:
        raise
    except Exception as e:  # the user's own code may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}{place_of(e)}"
        raise UserError(f"model.name={name}: {reason}") from e
    if not isinstance(recipe, Blueprint):
        kind = type(recipe).__name__
        raise UserError(f"model.name={name}: must give a Blueprint or a TreeNetwork, not {kind}")
    return for_inputs(grouped(settings, recipe), shape)


def for_inputs(recipe: Blueprint, shape: Shape) -> Blueprint:
    """The same network, whose stem unpacks samples of several tensors."""
    if shape.form is None:
        return recipe
    return replace(recipe, stem=partial(unpacking, recipe.stem, shape.form))


def own(settings: Settings, shape: Shape | int, key: str = "network") -> Any:
    """What the user's factory gives for the shape of the data, or for the inputs of a cell."""
    name = settings.model.name
    factory = imported("model.name", name)
    try:
        with seeded(settings.seed, "init", key):
            return factory(settings.model, shape)
    except UserError:
        raise
    except Exception as e:  # the user's own code may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}{place_of(e)}"
        raise UserError(f"model.name={name}: {reason}") from e


def of_network(settings: Settings, network: TreeNetwork) -> Blueprint:
    """The recipe of a network that the user's factory gives."""
    name, split = settings.model.name, network.tree.split
    if settings.split != split:
        raise UserError(f"split={settings.split}: the network of model.name={name} has {split}")
    if settings.model.group or settings.model.span:
        raise UserError(f"model.group: model.name={name} gives a network; group= is for its making")
    return recipe_of(network)


def grouped(settings: Settings, recipe: Blueprint) -> Blueprint:
    """The network with as many layers in a block as the settings say."""
    return recipe.grouped(grouping_of(settings.model, recipe.N - 1, settings.split))
