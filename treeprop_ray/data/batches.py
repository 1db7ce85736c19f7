"""The batches of a run.

Out of a source that can be indexed each is a function of its name, so there is no state to keep. A
stream is read in order, and where it stands is part of a run's state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from treeprop_ray.core.rng import derive, generator
from treeprop_ray.core.rule import HeldOut
from treeprop_ray.data.reading import Ahead, drawing
from treeprop_ray.data.sets import DataSet
from treeprop_ray.data.sources import Split
from treeprop_ray.data.streams import Reader, Stream


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

    def __init__(
        self, data: DataSet, batch: int, seed: int, steps: int = sys.maxsize, keep: int = 0
    ) -> None:
        """`steps` of the run; `keep`: batches of a stream that may be asked for again."""
        self.data, self.batch, self.seed, self.steps = data, batch, seed, steps
        self.per_epoch = data.steps_per_epoch(batch)
        self._order = -1, torch.empty(0, dtype=torch.long)  # of an epoch
        self._reader = Reader(data.train, seed, keep) if isinstance(data.train, Stream) else None
        self._ahead: Ahead[Any] | None = None  # a thread, once the first batch is asked for
        self._few: Ahead[tuple[Split, bool]] | None = None  # the same for some rows of a batch
        self._draws = False  # whether reading has been seen to draw random numbers

    def __call__(self, step: int, view: int = 0) -> tuple[Tensor, Tensor]:
        """The training batch of a step; another `view` is another augmentation of its samples."""
        part = self._stored(step)
        x = part.x
        if self.data.augment:
            x = self.data.augment(x, derive(self.seed, "augment", step, *([view] if view else [])))
        return self.data.inputs(x), self.data.labels(part.y)

    def some(
        self, step: int, rows: Tensor, all_labels: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Some rows of the training batch of a step, always the same ones, and the labels of all
        rows; None where only these rows were read, which have a single label each.

        Samples that are slow to read are read as far as they are needed, if what is drawn does not
        depend on the samples before: no augmentation, no draws while reading.
        """
        train = self.data.train
        apart = not (isinstance(train, Stream) or train.in_memory or self.data.augment)
        if apart and not all_labels and not self._draws and self._single_labels:
            self._few = self._few or Ahead(partial(self._read_some, rows), self.steps)
            part, self._draws = self._few(step)
            if not self._draws:
                return self.data.inputs(part.x), self.data.labels(part.y), None
        x, y = self(step)
        return x[rows], y[rows], y

    @cached_property
    def _single_labels(self) -> bool:
        return self.data.example.y.ndim == 1

    def _read_some(self, rows: Tensor, step: int) -> tuple[Split, bool]:
        """Some rows of a step, and whether anything was drawn while they were read."""
        once, back = rows.unique(return_inverse=True)
        with drawing(derive(self.seed, "samples", step)) as drew:
            part = self.data.split("train").take(self._index(step)[once])
        return part.take(back), drew()

    def _stored(self, step: int) -> Split:
        """The samples of a step; what is slow to read is read ahead, in a thread."""
        if self._reader:
            part, self._reader.stands = self._read_ahead(self._reader, step)
            return part
        if self.data.split("train").in_memory:
            return self._indexed(step)
        return self._read_ahead(self._indexed, step)

    def _indexed(self, step: int) -> Split:
        train, index = self.data.split("train"), self._index(step)
        if train.in_memory:
            return train.take(index)
        with drawing(derive(self.seed, "samples", step)):
            return train.take(index)

    def _index(self, step: int) -> Tensor:
        """The samples of a step by number."""
        epoch, position = divmod(step, self.per_epoch)
        known, order = self._order
        if epoch != known:
            gen = generator(self.seed, "order", epoch)
            order = torch.randperm(len(self.data.split("train")), generator=gen)
            self._order = epoch, order  # at once: two threads may read
        return order[position * self.batch : (position + 1) * self.batch]

    def _read_ahead(self, read: Callable[[int], Any], step: int) -> Any:
        self._ahead = self._ahead or Ahead(read, self.steps)
        return self._ahead(step)

    def state(self) -> dict[str, Tensor]:
        """Where a stream stands; nothing where the step's number says it all."""
        return self._reader.state() if self._reader else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state of `state`; other entries do not matter."""
        if self._reader:
            if self._ahead:
                self._ahead.settle()
            self._reader.load(state)

    def close(self) -> None:
        """End the thread that reads, and the pass over a stream."""
        for thread in (self._ahead, self._few):
            if thread:
                thread.close()
        if self._reader:
            self._reader.close()

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
        size = self.data.score_batch
        part = self.data.read("validation", slice(index * size, (index + 1) * size))
        x, y = part.x, self.data.labels(part.y)
        views = [x, x]
        if self.data.augment:
            seeds = [derive(self.seed, "validation view", index, view) for view in range(2)]
            views = [self.data.augment(x, seed) for seed in seeds]
        return self.data.inputs(torch.cat(views)), torch.cat([y, y])

    def held_out(self, k: int) -> tuple[Tensor, Tensor]:
        """The k-th batch of the validation split in its own order, over and over."""
        index = (torch.arange(self.batch) + k * self.batch) % len(self.data.validation)
        part = self.data.read("validation", index)
        return self.data.inputs(part.x), self.data.labels(part.y)
