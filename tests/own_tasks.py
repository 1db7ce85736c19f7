"""Own tasks as a user writes them: factories of data and networks, for the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from treeprop_ray import Blueprint, TreeNetwork

Splits = dict[str, Any]

G = torch.Generator().manual_seed(0)
X = torch.randn(96, 6, generator=G)
TOKENS = torch.randint(9, (96, 5), generator=G)
HIDDEN = torch.rand(96, 5, generator=G) < 0.6


def splits(x: Tensor, y: Tensor) -> Splits:
    cuts = {"train": slice(64), "validation": slice(64, 80), "test": slice(80, None)}
    return {name: (x[rows], y[rows]) for name, rows in cuts.items()}


def regression(data: Any) -> Splits:
    return splits(X, torch.stack([X.sum(1), X[:, 0]], 1))


def labels(data: Any) -> Splits:
    return splits(X, (X[:, :3] > 0).float())


def masked(data: Any) -> Splits:
    return splits(TOKENS, TOKENS.masked_fill(HIDDEN, -100))


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*splits(X, X[:, :3].argmax(1))["train"], strict=True)


def stream(data: Any) -> Splits:
    return {**splits(X, X[:, :3].argmax(1)), "train": Rows()}


def network(stem: Callable[[], nn.Module], outputs: int) -> Callable[..., Blueprint]:
    def block(l: int, r: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    return lambda model, shape: Blueprint(4, stem, block, lambda: nn.Linear(6, outputs))


regressor = network(lambda: nn.Linear(6, 6), 2)
tagger = network(lambda: nn.Linear(6, 6), 3)
filler = network(lambda: nn.Embedding(9, 6), 9)


def hub(model: Any, shape: Any) -> TreeNetwork:
    """A small GPT-2, whose table stem and head share."""
    import treeprop_ray.core.vision  # noqa: F401  (before transformers, which imports torchvision)

    import transformers as hf  # isort: skip

    words = {"vocab_size": 9, "n_positions": 8, "n_embd": 8, "n_head": 2, "n_layer": 3}
    return TreeNetwork.from_pretrained(hf.GPT2LMHeadModel(hf.GPT2Config(**words)))
