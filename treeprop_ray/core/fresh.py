"""A copy of a block with newly drawn weights, by rules that are known to fit; else an error."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from treeprop_ray.errors import UserError, first_line


@torch.no_grad()
def fresh_copy(block: nn.Module, what: str = "a copy") -> nn.Module:
    """A deep copy whose every parameter is drawn anew.

    torch's modules are drawn by their `reset_parameters` (or `_reset_parameters`), layers of
    Hugging Face's models as their model draws them (`_init_weights`). Parameters are NaN before, so
    one that no rule has drawn shows; it is an error.
    """
    try:
        twin = copy.deepcopy(block)
    except Exception as e:  # the user's own modules may hold anything
        raise UserError(
            f"{what}: {type(block).__name__} cannot be copied: {first_line(e)}; pass "
            "auxiliary=lambda l, r: … that makes the block"
        ) from e
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.fill_(math.nan)
    of_hub: set[nn.Module] = set()
    for module in twin.modules():
        if module not in of_hub and (draw := hub_rule(module)):
            inner_first = list(module.modules())[::-1]
            of_hub.update(inner_first)
            for inner in inner_first:
                draw(inner)
    plain = [module for module in twin.modules() if module not in of_hub]
    _reset(plain, "reset_parameters")
    _reset(plain[::-1], "_reset_parameters")  # it changes what inner modules have drawn
    for name, parameter in twin.named_parameters():
        if parameter.isnan().any():
            raise UserError(
                f"{what}: no rule is known that initialises {name} of {type(block).__name__}; "
                "pass auxiliary=lambda l, r: … that makes the block"
            )
    return twin


def _reset(modules: list[nn.Module], verb: str) -> None:
    for module in modules:
        reset = getattr(module, verb, None)
        if callable(reset):
            reset()


def hub_rule(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """How the model that a Hugging Face layer belongs to draws the weights of a module."""
    file = sys.modules.get(type(module).__module__)  # None in a script run by its path
    neighbours = vars(file).values() if file else ()
    models: list[Any] = [
        c for c in neighbours if isinstance(c, type) and is_base_of_models(c, module)
    ]
    configs = [inner.config for inner in module.modules() if hasattr(inner, "config")]
    if not models or not configs:
        return None
    model = models[0].__new__(models[0])  # only what `_init_weights` asks for: a config
    nn.Module.__init__(model)
    model.config = configs[0]
    for parameter in module.parameters():
        vars(parameter).pop("_is_hf_initialized", None)  # would be left alone
    draw: Callable[[nn.Module], None] = model._init_weights
    return draw


def is_base_of_models(candidate: type, module: nn.Module) -> bool:
    """Whether a class is e.g. `GPT2PreTrainedModel`, in the file of `GPT2Block`."""
    bases = [base.__name__ for base in candidate.__mro__[1:]]
    return candidate.__module__ == type(module).__module__ and (
        "PreTrainedModel" in bases and candidate.__name__.endswith("PreTrainedModel")
    )
