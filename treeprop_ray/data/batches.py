"""The batches of a run; each is a function of its name, so there is no state to keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treeprop_ray.core.rng import derive, generator
from treeprop_ray.core.rule import HeldOut
from treeprop_ray.data.sets import DataSet, targets


@dataclass(frozen=True)
class Scoring:
    """A large batch of a split, in order."""

    split: str
    index: int


@dataclass(frozen=True)
class Training:
    """The training batch of a step."""

    step: int


@dataclass(frozen=True)
class Views:
    """Two augmentations of a large validation batch, one after the other."""

    index: int


Which = Scoring | Training | Views | HeldOut


class Batches:
    """The batches of a data set.

    Epoch e is permuted by (seed, e), augmentation is drawn from (seed, step).
    """

    def __init__(self, data: DataSet, batch: int, seed: int) -> None:
        self.data, self.batch, self.seed = data, batch, seed
        self.per_epoch = data.steps_per_epoch(batch)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __call__(self, step: int, view: int = 0) -> tuple[Tensor, Tensor]:
        """The training batch of a step; another `view` is another augmentation of its samples."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            gen = generator(self.seed, "order", epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.data.train), generator=gen)
        index = self._order[position * self.batch : (position + 1) * self.batch]
        part = self.data.train.take(index)
        x = part.x
        if self.data.augment:
            x = self.data.augment(x, derive(self.seed, "augment", step, *([view] if view else [])))
        return self.data.inputs(x), targets(part.y)

    def get(self, which: Which) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a batch by its name."""
        match which:
            case Scoring(split, index):
                return self.data.scoring(split, index)
            case Training(step):
                return self(step)
            case Views(index):
                return self.views(index)
        return self.held_out(which.batch)

    def views(self, index: int) -> tuple[Tensor, Tensor]:
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
        return self.data.inputs(part.x), targets(part.y)
