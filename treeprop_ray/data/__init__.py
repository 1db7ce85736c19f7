"""Data sets, one function each, and the batches of a run."""

from __future__ import annotations

from dataclasses import replace

import torch

from treeprop_ray.config import Data, Settings, dotted, imported, recurrent
from treeprop_ray.core.network import Shape
from treeprop_ray.data import images, sequences, text
from treeprop_ray.data.augment import AUGMENTS
from treeprop_ray.data.batches import Batches, Scoring, Training, Views, Which
from treeprop_ray.data.sets import DataSet, Split, hold_out
from treeprop_ray.errors import UserError

__all__ = [
    "SETS", "Batches", "DataSet", "Scoring", "Shape", "Split", "Training", "Views", "Which", "load",
]  # fmt: skip

SETS = {**images.SETS, **text.SETS, "adding": sequences.adding}


def stored(data: Data) -> DataSet:
    """The samples as they are stored."""
    if not dotted(data.name):
        return SETS[data.name](data)
    made = imported("data.name", data.name)(data)
    if not isinstance(made, DataSet):
        raise UserError(f"data.name={data.name}: must give a DataSet, not {type(made).__name__}")
    return made


def load(settings: Settings) -> DataSet:
    """The data set that the settings name, with the validation split held out of train.

    `data.name=package.module:factory` calls factory(settings.data), which gives a DataSet.
    """
    data = stored(settings.data)
    if recurrent(settings):
        data = sequences.as_sequences(data, 2**settings.time.depth, settings.data.permuted)
    limit = settings.data.limit
    if settings.data.name in text.OWN_VALIDATION:
        train, validation = data.train, data.validation
        train = Split(train.x[:limit], train.y[:limit]) if limit else train
    else:
        train, validation = hold_out(data.train, settings.data.validation, limit)
    dtype = torch.float64 if settings.precision == "float64" else torch.float32
    augment = AUGMENTS[settings.data.augment]
    return replace(data, train=train, validation=validation, dtype=dtype, augment=augment)
