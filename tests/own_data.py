"""Own samples of every kind, for the tests of data, runs and engines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(50, 5, generator=GENERATOR)
Y = torch.arange(50) % 3
WORDS: dict[str, Any] = {"batch": 8, "steps": 12, "alpha": 1.0, "beta": 0.5, "sigma": 0.05}


class MapStyle(Dataset[Any]):
    def __init__(self, x: Tensor = X, y: Tensor = Y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.y[i])


class Noisy(MapStyle):
    """Every sample is augmented at random, by torch, numpy and Python."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(i)
        return x + torch.randn(5) + random.random() + np.random.rand(), y


class Plain(IterableDataset[Any]):
    def __init__(self, stop: int = 50) -> None:
        self.stop = stop

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.stop):
            yield X[i], Y[i]


class Stateful(Plain):
    """A stream that can say where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 50:
            self.at += 1
            yield X[self.at - 1], Y[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def rows() -> Any:
    return datasets.Dataset.from_dict(
        {"more": list(range(50)), "img": X.tolist(), "label": Y.tolist()},
        features=datasets.Features(
            {
                "more": datasets.Value("int64"),
                "img": datasets.List(datasets.Value("float32")),
                "label": datasets.ClassLabel(names=["a", "b", "c"]),
            }
        ),
    )
