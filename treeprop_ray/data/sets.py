"""A data set: three splits of stored samples, and how they become a network's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from treeprop_ray.core.network import Shape
from treeprop_ray.core.rng import generator
from treeprop_ray.data.augment import Augment
from treeprop_ray.errors import UserError

SCORE_BATCH = 1000


def targets(y: Tensor) -> Tensor:
    """Labels as a loss takes them: whole numbers as int64, others as they are."""
    return y if y.is_floating_point() else y.long()


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

    def steps_per_epoch(self, batch: int) -> int:
        """Whole batches of the train split."""
        if batch > len(self.train):
            raise UserError(
                f"batch={batch}: {self.name} has only {len(self.train)} training samples"
            )
        return len(self.train) // batch

    @property
    def sizes(self) -> dict[str, int]:
        """How many samples each split has."""
        return {name: len(self.split(name)) for name in ("train", "validation", "test")}

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
        return self.inputs(chosen.x[part]), targets(chosen.y[part])


def hold_out(train: Split, share: float, limit: int) -> tuple[Split, Split]:
    """Cut (train, validation) out of a train split; the same cut for every seed of a run."""
    order = torch.randperm(len(train), generator=generator(0, "hold out"))
    held = max(1, round(share * len(train)))
    kept = order[held:].sort().values
    return train.take(kept[:limit] if limit else kept), train.take(order[:held].sort().values)
