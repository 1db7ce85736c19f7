"""Networks: stem, blocks and head. Nothing about training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeprop_ray.config import family_of
from treeprop_ray.core.network import Blueprint

if TYPE_CHECKING:
    from treeprop_ray.config import Settings
    from treeprop_ray.data import DataSet, Shape


def blueprint(settings: Settings, data: DataSet | Shape) -> Blueprint:
    """How to make each part of the network that the settings name, for this data."""
    from treeprop_ray.models import gpt, mlp, vit

    make = {"mlp": mlp.blueprint, "vit": vit.blueprint, "gpt": gpt.blueprint}[settings.model.name]
    return make(settings.model, data.input_shape, data.classes, family_of(settings))
