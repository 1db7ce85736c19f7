"""A new method is one file (toy.py): registered, it has commands, engines, runs and recovery."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import toy
from conftest import Result
from ray import cloudpickle
from warm import warm_ray

from treeprop_ray.methods import register
from treeprop_ray.methods.base import METHODS
from treeprop_ray.run import checkpoint

cloudpickle.register_pickle_by_value(sys.modules["toy"])  # actors cannot import the tests
WORDS = ["method=toy", "model.activation=tanh", "model.blocks=3", "epochs=8", "lr=0.01"]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    method = register(toy.LocalLearning())
    yield
    METHODS.remove(method)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def test_a_method_of_one_file_trains_alike_in_one_process_and_on_actors(
    local_ray: None, command: Callable[..., Result], tmp_path: Path
) -> None:
    assert len(Path(toy.__file__).read_text().splitlines()) <= 80
    places = {"local": [], "ray": ["engine=ray", "placement=packed", "hosts=3", "microbatches=1"]}
    points = {}
    for name, words in places.items():
        result = command("train", *WORDS, *words, f"name={name}", f"out={tmp_path}")
        assert result.code == 0, result.err
        points[name] = checkpoint.newest(tmp_path / name / "checkpoints")
    one, many = points["local"], points["ray"]
    assert one and many and one.weights.keys() == many.weights.keys()
    assert all(torch.equal(value, many.weights[key]) for key, value in one.weights.items())
    assert one.meta["best"]["accuracy"] > 0.8


def test_it_has_the_commands_of_any_method(command: Callable[..., Result], tmp_path: Path) -> None:
    plan = command("train", *WORDS, "engine=ray", "placement=packed", "hosts=2", "--cfg")
    assert plan.code == 0 and "stage-1" in plan.out
    run = ["name=r", f"out={tmp_path}", "epochs=1"]
    assert command("train", *WORDS[:3], *run).code == 0
    assert command("evaluate", f"run={tmp_path / 'r'}").code == 0
    refused = command("train", *WORDS, "probe.every=5", f"out={tmp_path}")
    assert refused.code == 2 and "probe.every=5" in refused.err
