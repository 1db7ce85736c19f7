"""A data set: three splits of stored samples, and how they become a network's inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from treeprop_ray.core.inputs import Inputs
from treeprop_ray.core.network import Shape
from treeprop_ray.core.rng import derive, generator
from treeprop_ray.core.rule import LossRule
from treeprop_ray.data.augment import Augment
from treeprop_ray.data.reading import drawing
from treeprop_ray.data.sources import PLAIN, Source, Split, check_labels, targets
from treeprop_ray.data.streams import Stream
from treeprop_ray.errors import UserError

__all__ = ["DataSet", "Split", "hold_out"]

SCORE_BATCH = 1000


@dataclass(frozen=True)
class DataSet:
    """Three splits and how a stored batch becomes the network's input.

    `augment` changes stored training batches only.
    """

    name: str
    train: Source | Stream
    validation: Source
    test: Source
    classes: int  # 0: not known
    prepare: Callable[[Tensor], Tensor]
    dtype: torch.dtype = torch.float32
    augment: Augment | None = None
    permutation: Tensor | None = None  # the order in which a sequence reads the numbers
    score_batch: int = SCORE_BATCH  # samples that are scored at the same time
    own: bool = False  # a user's: its labels are checked as they come
    loss: LossRule = PLAIN  # what they are checked for

    @property
    def example(self) -> Split:
        """A training sample, as stored."""
        if isinstance(self.train, Stream):
            assert self.train.example is not None
            return self.train.example
        with drawing(0):
            return self.train.take(slice(0, 1))

    @property
    def resumes(self) -> bool:
        """Whether a stored run goes on with the samples that come next."""
        return not isinstance(self.train, Stream) or self.train.has_state

    @property
    def runs_tasks(self) -> bool:
        """Whether reading takes Ray tasks."""
        return isinstance(self.train, Stream) and self.train.runs_tasks

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one network input."""
        return tuple(self.prepare(self.example.x).shape[1:])

    @property
    def shape(self) -> Shape:
        """What a model must know of the data."""
        return Shape(self.input_shape, self.classes, self.dtype, self.form)

    @property
    def form(self) -> Inputs | None:
        """What the stem gets where samples have several tensors."""
        form = self.example.form
        return form.as_floats(self.dtype) if form else None

    @property
    def batch_counts(self) -> dict[str, int]:
        """How many evaluation batches each split has."""
        names = ("train", "validation", "test")
        return {name: -(-len(self.split(name)) // self.score_batch) for name in names}

    def steps_per_epoch(self, batch: int) -> int:
        """Whole batches of the train split; 0 for a stream that does not know its length."""
        if isinstance(self.train, Stream) and not len(self.train):
            return 0
        if batch > len(self.train):
            raise UserError(
                f"batch={batch}: {self.name} has only {len(self.train)} training samples"
            )
        return len(self.train) // batch

    def total_steps(self, batch: int, epochs: int, steps: int, epoch_steps: int) -> int:
        """Steps of a run: so many epochs, or `steps` of them if that is less; `epoch_steps` is for
        a stream that does not know its length."""
        per_epoch = self.steps_per_epoch(batch)
        if per_epoch and epoch_steps:
            raise UserError(
                f"data.epoch_steps={epoch_steps}: {self.name} knows that an epoch has {per_epoch}"
            )
        per_epoch = per_epoch or epoch_steps
        if not (per_epoch or steps):
            raise UserError(f"steps=0: {self.name} is a stream of unknown length; say how many")
        return min(steps or sys.maxsize, epochs * per_epoch or sys.maxsize)

    @property
    def sizes(self) -> dict[str, int]:
        """How many samples each split has."""
        return {name: len(self.split(name)) for name in ("train", "validation", "test")}

    @property
    def labels_per_sample(self) -> int:
        """How many labels a sample has: 1, or one for each place of a sequence."""
        return self.example.y[0].numel()

    def split(self, name: str) -> Source:
        """The samples of `train`, `validation` or `test`."""
        chosen: Source = getattr(self, name)
        return chosen

    def inputs(self, x: Tensor) -> Tensor:
        """Stored samples to network input."""
        x = self.prepare(x)
        return x.to(self.dtype) if x.is_floating_point() else x

    def labels(self, y: Tensor) -> Tensor:
        """Stored labels to what the loss takes."""
        y = targets(y)
        if self.own:
            check_labels(y, self.classes, self.name, self.loss)
        return y

    def batches(self, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole split in order, in large batches."""
        if not self.batch_counts[split]:
            raise UserError(f"split={split}: {self.name} has no {split} samples")
        return (self.scoring(split, i) for i in range(self.batch_counts[split]))

    def scoring(self, split: str, index: int) -> tuple[Tensor, Tensor]:
        """One large batch of a split."""
        part = self.read(split, slice(index * self.score_batch, (index + 1) * self.score_batch))
        return self.inputs(part.x), self.labels(part.y)

    def read(self, split: str, index: Tensor | slice) -> Split:
        """Some samples of a split; what is drawn while reading is always the same."""
        chosen = self.split(split)
        if chosen.in_memory:
            return chosen.take(index)
        with drawing(derive(0, "read", split)):
            return chosen.take(index)


def hold_out(train: Source, share: float, limit: int) -> tuple[Source, Source]:
    """Cut (train, validation) out of a train split; the same cut for every seed of a run."""
    order = torch.randperm(len(train), generator=generator(0, "hold out"))
    held = max(1, round(share * len(train)))
    kept = order[held:].sort().values
    return train.part(kept[:limit] if limit else kept), train.part(order[:held].sort().values)
