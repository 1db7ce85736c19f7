"""Augmentation of training images: whole uint8 batches, drawn from named seeds alone.

The augmented batch of a step is a function of (seed, step), so a resumed or replayed run sees the
same pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from treeprop_ray.core.rng import derive, generator, seeded_cpu

Augment = Callable[[Tensor, int], Tensor]  # (uint8 images (B, C, S, S), seed) -> the same shape


def crop_flip(x: Tensor, seed: int) -> Tensor:
    """Shift every image by up to an eighth of its side (black comes in) and flip half of them."""
    B, _, height, width = x.shape
    pad = max(1, height // 8)
    gen = generator(seed, "crop")
    corners = torch.randint(0, 2 * pad + 1, (B, 2), generator=gen).tolist()
    flips = (torch.rand(B, generator=gen) < 0.5).tolist()
    padded = torch.nn.functional.pad(x, (pad, pad, pad, pad)).numpy()
    out = torch.empty_like(x)
    target = out.numpy()  # slices of numpy cost a tenth of torch's, and there are B of them
    for i, ((top, left), flip) in enumerate(zip(corners, flips, strict=True)):
        taken = padded[i, :, top : top + height, left : left + width]
        target[i] = taken[:, :, ::-1] if flip else taken
    return out


def standard(x: Tensor, seed: int, group: int = 16) -> Tensor:
    """Random crop and flip per sample, then RandAugment per `group` of samples."""
    from treeprop_ray.core.vision import v2

    transform = v2.RandAugment()
    out = crop_flip(x, seed)
    with seeded_cpu(derive(seed, "randaugment")):  # RandAugment draws from torch's own generator
        for some in out.split(group):
            some.copy_(transform(some))
    return out


def augment_of(name: str, group: int) -> Augment | None:
    """The augmentation of data.augment and data.augment_group."""
    return {"none": None, "crop_flip": crop_flip, "standard": partial(standard, group=group)}[name]
