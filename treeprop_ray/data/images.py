"""Image sets: scikit-learn's digits (embedded) and hub sets decoded once into uint8 arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treeprop_ray.core.rng import generator
from treeprop_ray.data.cache import cached
from treeprop_ray.data.hub import cache_folder, load_split, row_at
from treeprop_ray.data.sets import DataSet, Split
from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from treeprop_ray.config import Data

DIGITS_TEST = 360  # a fifth of scikit-learn's 1797 digits


def unit_scale(x: Tensor) -> Tensor:
    """uint8 pixels to [0, 1]."""
    return x.float() / 255


def normalise(mean: tuple[float, ...], std: tuple[float, ...], x: Tensor) -> Tensor:
    """uint8 pixels to values with mean 0 and deviation 1 in every channel of the training set."""
    shape = (len(mean), 1, 1)
    scale = 255 * torch.tensor(std).view(shape)
    return (x - 255 * torch.tensor(mean).view(shape)) / scale


def digits(data: Data) -> DataSet:
    """1797 handwritten digits of 8x8 pixels with 17 grey levels, shipped with scikit-learn."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy((bunch.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(1)
    y = torch.from_numpy(bunch.target.astype(np.int64))
    every = Split(x, y)
    order = torch.randperm(len(every), generator=generator(0, "digits test"))
    train, test = every.take(order[DIGITS_TEST:]), every.take(order[:DIGITS_TEST])
    return DataSet("digits", train, test, test, 10, unit_scale)


def mnist(data: Data) -> DataSet:
    """MNIST from the hub layout `ylecun/mnist`: 60000 + 10000 images of 28x28 pixels."""
    train = decoded("ylecun/mnist", "train", "image", "label", (1, 28, 28), 10, data)
    test = decoded("ylecun/mnist", "test", "image", "label", (1, 28, 28), 10, data)
    return DataSet("mnist", train, test, test, 10, unit_scale)


def cifar10(data: Data) -> DataSet:
    """CIFAR-10 from the hub layout `uoft-cs/cifar10`: colour images of 32x32 pixels."""
    statistics = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    columns = "img", "label"
    return colour("cifar10", "uoft-cs/cifar10", "test", columns, 32, 10, statistics, data)


def cifar100(data: Data) -> DataSet:
    """CIFAR-100 from the hub layout `uoft-cs/cifar100`, with its 100 fine labels."""
    statistics = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    columns = "img", "fine_label"
    return colour("cifar100", "uoft-cs/cifar100", "test", columns, 32, 100, statistics, data)


def tinyimagenet(data: Data) -> DataSet:
    """TinyImageNet from the hub layout `zh-plus/tiny-imagenet`: 64x64 pixels, 200 classes.

    The labelled `valid` split is the test set, as everywhere; some pictures are stored in grey.
    """
    statistics = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    columns, repo = ("image", "label"), "zh-plus/tiny-imagenet"
    return colour("tinyimagenet", repo, "valid", columns, 64, 200, statistics, data)


def colour(
    name: str,
    repo: str,
    test: str,
    columns: tuple[str, str],
    side: int,
    classes: int,
    statistics: tuple[tuple[float, ...], tuple[float, ...]],
    data: Data,
) -> DataSet:
    """A hub set of square colour images; `statistics` are mean and deviation of the channels."""
    size = (3, side, side)
    train, held = (decoded(repo, s, *columns, size, classes, data) for s in ("train", test))
    return DataSet(name, train, held, held, classes, partial(normalise, *statistics))


SETS: dict[str, Callable[[Data], DataSet]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tinyimagenet": tinyimagenet,
}


def decoded(
    repo: str,
    split: str,
    image: str,
    label: str,
    shape: tuple[int, int, int],
    classes: int,
    data: Data,
) -> Split:
    """Images of a hub split as a memory-mapped uint8 array (n, C, H, W), decoded on first use."""
    folder = cache_folder(repo, split, data.root)
    y = cached(folder / "y.npy", lambda: _labels(repo, split, label, classes, data))
    x = cached(folder / "x.npy", lambda: _pixels(repo, split, image, shape, data))
    if x.shape != (len(y), *shape) or x.dtype != np.uint8:
        raise UserError(f"{folder}: the cache is of other images {x.shape}; remove the folder")
    return Split(torch.from_numpy(x), torch.from_numpy(y))


def _labels(repo: str, split: str, label: str, classes: int, data: Data) -> Any:
    rows = load_split(repo, split, data.root)
    if label not in rows.column_names:
        have = ", ".join(rows.column_names)
        raise UserError(f"{repo}, split {split}: has no column {label}; it has {have}")
    values = rows[label][:]
    for i, value in enumerate(values):
        if not isinstance(value, int) or not 0 <= value < classes:
            where = row_at(repo, split, data.root, i)
            raise UserError(f"{where}: label {value} is outside the classes 0 … {classes - 1}")
    return np.asarray(values, dtype=np.int64)


def _pixels(repo: str, split: str, image: str, shape: tuple[int, int, int], data: Data) -> Any:
    rows = load_split(repo, split, data.root)
    mode = "L" if shape[0] == 1 else "RGB"
    x = np.empty((len(rows), *shape), dtype=np.uint8)
    for i in range(len(rows)):
        try:
            picture = np.asarray(rows[i][image].convert(mode))
        except Exception as e:
            where = row_at(repo, split, data.root, i)
            raise UserError(f"{where}: image {i} of split {split} is damaged: {e}") from e
        picture = picture[None] if picture.ndim == 2 else picture.transpose(2, 0, 1)
        if picture.shape != shape:
            raise UserError(
                f"{row_at(repo, split, data.root, i)}: image {i} of split {split} has shape "
                f"{picture.shape}, expected {shape}"
            )
        x[i] = picture
    return x
