"""Samples as sequences of N = 2**D symbols, and a long-memory task made on the spot."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from treeprop_ray.core.rng import generator
from treeprop_ray.data.sets import DataSet, Split

if TYPE_CHECKING:
    from treeprop_ray.config import Data

LEVELS = 5  # values of the adding task: 0, 1/4, …, 1


def symbols(flat: Tensor, N: int) -> Tensor:
    """(n, numbers) to (n, N, S): zeros at the start up to a multiple of N, then N equal pieces."""
    size = -(-flat.shape[1] // N)
    return F.pad(flat, (N * size - flat.shape[1], 0)).unflatten(1, (N, size))


def as_sequences(data: DataSet, N: int, permuted: bool) -> DataSet:
    """The same samples, read number by number; `permuted` by one order, fixed for all runs."""
    prepare = data.prepare
    count = prepare(data.example.x).numel()
    order = None
    if permuted:
        order = torch.randperm(count, generator=generator(0, "permutation", count))

    def sequence(x: Tensor) -> Tensor:
        flat = prepare(x).flatten(1)
        return symbols(flat if order is None else flat[:, order], N)

    return replace(data, prepare=sequence, permutation=order)


def adding(data: Data) -> DataSet:
    """The adding task as a classification: the sum of the two marked values of a long sequence.

    Each of `data.length` steps has a value of 0, 1/4, …, 1 and a mark; one step of the first half
    and one of the second is marked. The label is four times the sum: 0 … 8.
    """
    train = _adding("train", data.samples, data.length)
    test = _adding("test", max(1, data.samples // 5), data.length)
    return DataSet("adding", train, test, test, 2 * LEVELS - 1, _adding_input)


def _adding_input(x: Tensor) -> Tensor:
    return x.float() * torch.tensor([1 / (LEVELS - 1), 1.0])


def _adding(split: str, samples: int, length: int) -> Split:
    gen = generator(0, "adding", split, length)
    values = torch.randint(0, LEVELS, (samples, length), generator=gen)
    half = length // 2
    first = torch.randint(0, half, (samples, 1), generator=gen)
    second = torch.randint(half, length, (samples, 1), generator=gen)
    marks = torch.zeros_like(values).scatter_(1, first, 1).scatter_(1, second, 1)
    label = (values * marks).sum(1)
    return Split(torch.stack((values, marks), 2).to(torch.uint8), label)
