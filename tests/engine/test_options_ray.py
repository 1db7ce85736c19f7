"""Training options give the same weights with actors as in one process, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_network
from torch import nn
from warm import warm_ray

from treeprop_ray import TreeNetwork, fit
from treeprop_ray.run import checkpoint

WORDS = ["experiment=digits", "model.hidden=8", "batch=32", "steps=6", "timeline_steps=0"]
TANH = ["model.activation=tanh", "beta=0.5", "sigma=0.05"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with warm_ray():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    from treeprop_ray import export, train

    out = tmp_path_factory.mktemp("source")
    assert train.main([*WORDS, f"out={out}", "name=source", "seed=7"]) == 0
    assert export.main([f"run={out / 'source'}", "path=spine-1"]) == 0
    return out / "source"


@pytest.mark.parametrize(
    "words",
    [
        [*TANH, "freeze=[0..3,0-4]", "clip=0.1", "probe.every=3", "probe.batches=1"],
        ["freeze=[0-4,'4-*',head]", "optimizer=muon", "decay_norms=false", "accumulate=2"],
        [*TANH, "recompute=true", "optimizer=own_optim:counting", "schedule=own_optim:halves"],
        ["init_from=source", "betas=[0.8,0.9]", "eps=1e-6", "freeze=[0..3]"],
        ["init_from=source/export/spine-1", "init_strict=false"],
        [*TANH, "compile=true", "compile_backend=aot_eager", "accumulate=2"],
        [*TANH, "precision=fp16", "microbatches=2", "probe.every=3", "probe.batches=1"],
        ["method=bp", "freeze=[0..4]", "accumulate=2", "init_from=source", "recompute=true"],
        ["method=cff", "freeze=[0..2]", "cff.head_share=0.4", "init_from=source"],
        ["init_from=source/checkpoints/step-00000006", "model.group=2", "recompute=true"],
        [*TANH, "model.span=0.75", "objective=node"],
        ["method=bp", "precision=fp16", "microbatches=2"],
        ["method=cff", "precision=fp16", "cff.head_share=0.4"],
    ],
    ids=[
        "freeze",
        "muon",
        "recompute",
        "init_from",
        "export",
        "compile",
        "fp16",
        "bp",
        "cff",
        "group",
        "span",
        "fp16-bp",
        "fp16-cff",
    ],
)
def test_actors_equal_one_process(
    words: list[str], source: Path, tmp_path: Path, command: Callable[..., Any]
) -> None:
    words = [word.replace("=source", f"={source}") for word in words]
    weights = {}
    for engine in (["engine=local"], ["engine=ray", "placement=packed", "hosts=2"]):
        words_of = [*WORDS, *words, *engine, f"out={tmp_path}", f"name={engine[0][7:]}"]
        done = command("train", *words_of)
        assert done.code == 0, done.err
        point = checkpoint.load(tmp_path / engine[0][7:] / "checkpoints", 6)
        weights[engine[0]] = (point.weights, point.optimizer)
    for mine, theirs in zip(weights["engine=ray"], weights["engine=local"], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())


@pytest.mark.parametrize(
    "changed",
    [["lr=0.02"], ["lr=0.02", "schedule=cosine", "weight_decay=0.1", "clip=0.1", "freeze=[0-1]"]],
    ids=["lr", "all"],
)
def test_another_learning_rate_from_here_on_equals_one_process(
    changed: list[str], tmp_path: Path, command: Callable[..., Any]
) -> None:
    """Begun in one process; each engine goes on from there."""
    first = command("train", *WORDS, "steps=3", "checkpoint_every=3", f"out={tmp_path}", "name=one")
    assert first.code == 0, first.err
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    weights = []
    for name, where in (("one", []), ("two", ["engine=ray", "placement=packed", "hosts=2"])):
        words = [*WORDS, "checkpoint_every=3", *changed, "resume_with_changes=true", *where]
        done = command("train", *words, f"out={tmp_path}", f"name={name}")
        assert done.code == 0, done.err
        (line,) = (text for text in done.out.splitlines() if "from step 3 on" in text)
        assert all(f"{word.partition('=')[0]}: " in line for word in changed)
        weights.append(checkpoint.load(tmp_path / name / "checkpoints", 6).weights)
    assert all(torch.equal(weights[0][key], value) for key, value in weights[1].items())


def test_fit_with_frozen_parameters_equals_one_process() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.randint(3, (32,))
    states = []
    for where in ({}, {"engine": "ray", "placement": "packed", "hosts": 2}):
        network = tiny_network(5)
        network.stem.requires_grad_(False)
        network.edges["0-2"].requires_grad_(False)
        states.append(
            fit(network, x, y, epochs=2, batch=16, freeze=["head"], **where).network.state_dict()
        )
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


def test_own_blocks_of_several_layers_equal_one_process() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    states = []
    for where in ({}, {"engine": "ray", "placement": "packed", "hosts": 2}):
        torch.manual_seed(0)
        network = TreeNetwork.from_blocks(
            nn.Linear(6, 6), [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)],
            nn.Linear(6, 3), example=x[:2], group=[2, 1, 2, 1], auxiliary_layers=2,
        )  # fmt: skip
        assert network.tree.N == 5
        states.append(fit(network, x, y, epochs=2, batch=16, **where).network.state_dict())
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())
