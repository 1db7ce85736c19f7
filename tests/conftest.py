"""What the tests share: small networks on random data, and running commands in this process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from treeprop_ray.core.network import Blueprint, TreeNetwork
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Batches, DataSet, Split

torch.set_num_threads(1)
torch.set_num_interop_threads(1)


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return self.err.strip().splitlines()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `python -m treeprop_ray.<name> words…` in this process."""

    def run(name: str, *words: str) -> Result:
        capsys.readouterr()
        code = importlib.import_module(f"treeprop_ray.{name}").main(list(words))
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def hub() -> Path:
    """The folder with real data sets; tests that need it are skipped where it is not there."""
    root = os.environ.get("TREEPROP_DATA")
    if not root:
        pytest.skip("TREEPROP_DATA is not set: no real data sets on this machine")
    return Path(root)


class Affine(nn.Module):
    """Reshape-free helper: a linear map and a nonlinearity."""

    def __init__(self, inputs: int, outputs: int, family: str) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.family = family

    def forward(self, z: Tensor) -> Tensor:
        z = self.linear(z)
        return torch.sigmoid(z) if self.family == "bernoulli" else torch.tanh(z)


def tiny_blueprint(N: int, family: str = "gaussian", stem: bool = True) -> Blueprint:
    """5 inputs, width 4, 3 classes."""

    def block(l: int, r: int) -> nn.Module:
        return Affine(5 if l == 0 and not stem else 4, 4, family)

    make_stem = (lambda: nn.Linear(5, 4)) if stem else nn.Identity
    return Blueprint(N, make_stem, block, lambda: nn.Linear(4, 3), family)


def tiny_network(
    N: int, split: str = "floor", family: str = "gaussian", stem: bool = True, seed: int = 3
) -> TreeNetwork:
    return TreeNetwork.from_blueprint(
        tiny_blueprint(N, family, stem), Tree(N, split), seed, torch.float64
    )


def tiny_batches(batch: int = 6, samples: int = 6) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    split = Split(x, torch.arange(samples) % 3)
    return Batches(DataSet("tiny", split, split, split, 3, lambda x: x, torch.float64), batch, 1)
