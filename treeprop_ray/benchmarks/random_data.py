"""Random data of the right shapes: neither time nor memory depends on what a sample shows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from treeprop_ray.config import Settings
from treeprop_ray.data import Batches, DataSet, Split
from treeprop_ray.data.images import unit_scale
from treeprop_ray.data.sequences import as_sequences
from treeprop_ray.methods import Job, job_of

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
VOCABULARY = 50257  # of GPT-2
TOTAL_STEPS = 1000  # of the run whose learning rates are used


def random_images(n: int = 256, shape: tuple[int, ...] = CIFAR) -> DataSet:
    """Noise in the shape of images, ten classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
    split = Split(x, torch.arange(n) % 10)
    return DataSet("random", split, split, split, 10, unit_scale)


def random_sequences(n: int, D: int) -> DataSet:
    """MNIST-shaped noise as 2**D symbols, prepared already."""
    images = random_images(n, MNIST)
    x = as_sequences(images, 2**D, False).prepare(images.read("train", slice(None)).x)
    split = Split(x, images.read("train", slice(None)).y)
    return DataSet("random", split, split, split, 10, lambda x: x)


def random_text(settings: Settings) -> DataSet:
    """Windows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (4 * settings.batch, settings.data.length)
    x, y = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    split = Split(x, y)
    return DataSet("random", split, split, split, VOCABULARY, Tensor.long, score_batch=1)


def random_job(settings: Settings, data: DataSet) -> Job:
    """A job that trains on this data, wherever its hosts are."""
    batches = partial(Batches, data, settings.batch, settings.seed)
    return replace(job_of(settings, data, TOTAL_STEPS), batches=batches)
