"""What the tests share: small networks on random data, and running commands in this process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import ray
import torch
from hypothesis import Phase
from torch import Tensor, nn

from treeprop_ray import engine, methods
from treeprop_ray.config import Settings
from treeprop_ray.core.network import Blueprint, TreeNetwork
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Batches, DataSet, Split
from treeprop_ray.engine import LocalEngine
from treeprop_ray.engine.crew import Crew
from treeprop_ray.engine.driver import Driver
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.trainer import Trainer

# for `make mutants`: that an example fails is enough, the smallest one is not looked for
hypothesis.settings.register_profile("first_failure", phases=[Phase.explicit, Phase.generate])
torch.set_num_threads(1)
torch.set_num_interop_threads(1)


HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(  # actors import what the tests import
    [
        *map(str, (HERE, HERE / "core", HERE.parent / "examples")),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that share a Ray one after the other, then those with processes of their own: two test
    processes end at about the same time if what is short comes last."""

    def place(item: pytest.Item) -> int:
        names = vars(getattr(item, "module", None) or item)
        return 0 if "warm_ray" in names else 1 if {"ray", "subprocess"} & names.keys() else 2

    items.sort(key=place)


@pytest.fixture(scope="module", autouse=True)
def ray_of_others(request: pytest.FixtureRequest) -> None:
    """A file that does not ask for the shared Ray (warm.py) begins without one."""
    if not hasattr(request.module, "warm_ray"):
        ray.shutdown()


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


@pytest.fixture
def cold_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors are made in their places for this test alone, in a file with warm ones (warm.py)."""
    monkeypatch.setattr(Driver, "crew_class", Crew)


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


def engine_of(settings: Settings, data: DataSet, steps: int) -> Any:
    """The engine that the settings name."""
    return engine.build(methods.job_of(methods.checked(settings), data, steps))


def local_engine(
    network: TreeNetwork,
    rule: Rule,
    optimizer: OptimizerRule,
    batches: Batches,
    pieces: int = 1,
    method: str = "tree",
) -> LocalEngine:
    """The local engine over the modules of a network, with a rule of one's own."""
    settings = Settings(method=method, batch=batches.batch, microbatches=pieces)
    job = methods.job_over(network, settings, batches.data, optimizer.total_steps)
    return LocalEngine(replace(job, rule=rule, optimizer=optimizer, batches=lambda: batches))


class Stopped(Exception):
    """Raised by `StopAt`."""


class StopAt(Callback):
    """Ends a run after so many steps, before the checkpoint of that step."""

    def __init__(self, steps: int, error: Exception | None = None) -> None:
        self.steps, self.error = steps, error or Stopped()

    def on_step(self, run: Trainer, done: int) -> None:
        if done == self.steps:
            raise self.error
