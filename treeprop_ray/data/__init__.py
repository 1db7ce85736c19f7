"""Data sets, one function each; the batch of a step is a function of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treeprop_ray.core.rng import derive, generator
from treeprop_ray.data.augment import AUGMENTS, Augment
from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from treeprop_ray.config import Settings

SCORE_BATCH = 1000
HELD_OUT = 1024  # the probe has at most so many held-out batches


@dataclass(frozen=True)
class Split:
    """Samples as stored (images: uint8) and their labels."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Tensor) -> Split:
        return Split(self.x[index], self.y[index])


@dataclass(frozen=True)
class Shape:
    """What a model must know of the data."""

    input_shape: tuple[int, ...]
    classes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class DataSet:
    """Three splits and how a stored batch becomes the network's input.

    `augment` changes stored training batches only.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    classes: int
    prepare: Callable[[Tensor], Tensor]
    dtype: torch.dtype = torch.float32
    augment: Augment | None = None
    permutation: Tensor | None = None  # the order in which a sequence reads the numbers
    score_batch: int = SCORE_BATCH  # samples that are scored at the same time

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one network input."""
        return tuple(self.prepare(self.train.x[:1]).shape[1:])

    @property
    def shape(self) -> Shape:
        """What a model must know of the data."""
        return Shape(self.input_shape, self.classes, self.dtype)

    @property
    def batch_counts(self) -> dict[str, int]:
        """How many evaluation batches each split has."""
        names = ("train", "validation", "test")
        return {name: -(-len(self.split(name)) // self.score_batch) for name in names}

    @property
    def labels_per_sample(self) -> int:
        return self.train.y[0].numel()

    def split(self, name: str) -> Split:
        chosen: Split = getattr(self, name)
        return chosen

    def inputs(self, x: Tensor) -> Tensor:
        """Stored samples to network input."""
        x = self.prepare(x)
        return x.to(self.dtype) if x.is_floating_point() else x

    def batches(self, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole split in order, in large batches."""
        return (self.scoring(split, i) for i in range(self.batch_counts[split]))

    def scoring(self, split: str, index: int) -> tuple[Tensor, Tensor]:
        """One large batch of a split."""
        chosen = self.split(split)
        part = slice(index * self.score_batch, (index + 1) * self.score_batch)
        return self.inputs(chosen.x[part]), chosen.y[part].long()


class Batches:
    """The training batch of any step: a function of (seed, step), so there is no state.

    Epoch e is permuted by (seed, e), augmentation is drawn from (seed, step). Negative steps are
    the probe's: step -1 - k is the k-th batch of the validation split, and so is every multiple of
    HELD_OUT below it.
    """

    def __init__(self, data: DataSet, batch: int, seed: int) -> None:
        if batch > len(data.train):
            raise UserError(
                f"batch={batch}: {data.name} has only {len(data.train)} training samples"
            )
        self.data, self.batch, self.seed = data, batch, seed
        self.per_epoch = len(data.train) // batch
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __call__(self, step: int, view: int = 0) -> tuple[Tensor, Tensor]:
        """The batch of a step; another `view` is another augmentation of the same samples."""
        if step < 0:
            return self.held_out((-1 - step) % HELD_OUT)
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            gen = generator(self.seed, "order", epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.data.train), generator=gen)
        index = self._order[position * self.batch : (position + 1) * self.batch]
        part = self.data.train.take(index)
        x = part.x
        if self.data.augment:
            x = self.data.augment(x, derive(self.seed, "augment", step, *([view] if view else [])))
        return self.data.inputs(x), part.y.long()

    def validation_views(self, index: int) -> tuple[Tensor, Tensor]:
        """Two augmentations of a large validation batch, always the same; labels of all rows."""
        part = slice(index * self.data.score_batch, (index + 1) * self.data.score_batch)
        x, y = self.data.validation.x[part], self.data.validation.y[part]
        views = [x, x]
        if self.data.augment:
            seeds = [derive(self.seed, "validation view", index, view) for view in range(2)]
            views = [self.data.augment(x, seed) for seed in seeds]
        return self.data.inputs(torch.cat(views)), torch.cat([y, y])

    def held_out(self, k: int) -> tuple[Tensor, Tensor]:
        """The k-th batch of the validation split in its own order, over and over."""
        held = self.data.validation
        part = held.take((torch.arange(self.batch) + k * self.batch) % len(held))
        return self.data.inputs(part.x), part.y.long()

    def evaluation(self, split: str, index: int) -> tuple[Tensor, Tensor]:
        """A batch to score: of a split, the training batch of a step (`split="step"`), or two
        views of a validation batch (`split="views"`)."""
        if split == "views":
            return self.validation_views(index)
        return self(index) if split == "step" else self.data.scoring(split, index)


def hold_out(train: Split, share: float, limit: int) -> tuple[Split, Split]:
    """Cut (train, validation) out of a train split; the same cut for every seed of a run."""
    order = torch.randperm(len(train), generator=generator(0, "hold out"))
    held = max(1, round(share * len(train)))
    kept = order[held:].sort().values
    return train.take(kept[:limit] if limit else kept), train.take(order[:held].sort().values)


def load(settings: Settings) -> DataSet:
    """The data set that the settings name, with the validation split held out of train."""
    from treeprop_ray.config import recurrent
    from treeprop_ray.data import images, sequences, text

    sets = {**images.SETS, **text.SETS, "adding": sequences.adding}
    data = sets[settings.data.name](settings.data)
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
