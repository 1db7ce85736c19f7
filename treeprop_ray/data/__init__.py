"""Data sets, one function each, and the batches of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from treeprop_ray.config import Settings, dotted, imported, recurrent
from treeprop_ray.core.network import Shape
from treeprop_ray.core.rule import LossRule
from treeprop_ray.data import images, sequences, text
from treeprop_ray.data.augment import augment_of
from treeprop_ray.data.batches import Batches, Scoring, Training, Views, Which
from treeprop_ray.data.own import columns_of, own_set
from treeprop_ray.data.sets import DataSet, Split, hold_out
from treeprop_ray.data.streams import Stream
from treeprop_ray.errors import UserError

__all__ = [
    "SETS", "Batches", "DataSet", "Scoring", "Shape", "Split", "Training", "Views", "Which", "load",
]  # fmt: skip

SETS = {**images.SETS, **text.SETS, "adding": sequences.adding}


def stored(settings: Settings) -> tuple[DataSet, bool]:
    """The samples as they are stored, and whether their validation split is their own."""
    data, count = settings.data, settings.step_samples
    if not dotted(data.name):
        return SETS[data.name](data), data.name in text.OWN_VALIDATION
    given = imported("data.name", data.name)(data)
    if isinstance(given, DataSet):
        return given, False
    splits = given if isinstance(given, Mapping) else {"train": given}
    columns = columns_of("data.columns", data.columns)
    loss = LossRule.of(settings)
    own = own_set(splits, columns, count, data.classes, count // settings.batch, loss)
    own = replace(own, name=data.name)
    return own, splits.get("validation") is not None or isinstance(own.train, Stream)


def load(settings: Settings) -> DataSet:
    """The data set that the settings name, with the validation split held out of train.

    `data.name=package.module:factory` calls factory(settings.data), which gives a DataSet, or
    training samples of any kind (data/own.py), or a mapping of splits by name.
    """
    data, own_validation = stored(settings)
    if recurrent(settings):
        if form := data.example.form:
            raise UserError(
                f"model.name={settings.model.name}: reads one sequence, samples have {form}"
            )
        data = sequences.as_sequences(data, 2**settings.time.depth, settings.data.permuted)
    if data.example.form and settings.data.augment != "none":
        raise UserError(
            f"data.augment={settings.data.augment}: is for images, samples have {data.example.form}"
        )
    limit, train, validation = settings.data.limit, data.train, data.validation
    if isinstance(train, Stream):
        if limit:
            raise UserError(f"data.limit={limit}: {data.name} is a stream; take a part of it there")
    elif not own_validation:
        train, validation = hold_out(train, settings.data.validation, limit)
    elif limit:
        train = train.part(torch.arange(min(limit, len(train))))
    dtype = torch.float64 if settings.precision == "float64" else torch.float32
    augment = augment_of(settings.data.augment, settings.data.augment_group)
    return replace(data, train=train, validation=validation, dtype=dtype, augment=augment)
