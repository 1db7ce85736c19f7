"""finish: the last steps of a tree's run are backpropagation of its chain, on the same hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import StopAt, Stopped, engine_of
from torch import Tensor

from treeprop_ray import TreeNetwork, config, data, methods
from treeprop_ray.benchmarks import rehearsal
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import State
from treeprop_ray.models import blueprint
from treeprop_ray.run.trainer import Trainer
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.ops import STEP
from treeprop_ray.schedule.probe import FINISH

SMALL = ["model.hidden=8", "batch=32", "model.activation=tanh", "alpha=1", "beta=0"]
GPT = ["experiment=text_small", "model.hidden=8", "model.heads=2", "data.length=8", "batch=6",
       "data.limit=64"]  # fmt: skip


def engine_for(words: list[str], total: int = 6) -> Any:
    settings = config.load([*SMALL, *words])
    return engine_of(settings, data.load(settings), total)


def after(words: list[str], steps: int = 6) -> State:
    engine = engine_for(words)
    for step in range(steps):
        engine.step(step, report=True)
    state: State = engine.state()
    return state


def parts(weights: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {k: v for k, v in weights.items() if k.partition("/")[0] in names}


@pytest.mark.parametrize(
    "words",
    [
        ["clip=0.05", "microbatches=3"],
        ["recompute=true", "precision=bf16"],
        ["model.group=[2,2,3]", "model.auxiliary_layers=2"],
        ["chain_lr=3", "optimizer=sgd"],
        ["freeze=[0..2]"],
        [*GPT, "model.dropout=0.1"],
    ],
    ids=["clip", "recompute", "group", "chain_lr", "freeze", "gpt"],
)
def test_a_finish_of_all_steps_is_backpropagation(words: list[str]) -> None:
    """Bit for bit, with the optimizer's state; chain_lr ends where the finish begins."""
    expected, found = after([*words, "method=bp"]), after([*words, "finish=1"])
    for mine, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key
    assert found[1].keys() == expected[1].keys()  # auxiliary blocks have no gradients at all


def test_one_schedule_and_a_kept_optimizer() -> None:
    """Before the switch it is the run without a finish; then the chain moves, the rest stays."""
    words = ["schedule=cosine", "lr=0.01"]
    plain, engine = engine_for(words), engine_for([*words, "finish=0.5"])
    for step in range(3):
        plain.step(step, report=False)
        engine.step(step, report=False)
    before = engine.state()
    for mine, theirs in zip(before, plain.state(), strict=True):
        assert all(torch.equal(mine[k], v) for k, v in theirs.items())
    engine.step(3, report=True)
    assert set(engine.reports()[0].losses) == {8}
    for step in (4, 5):
        engine.step(step, report=True)
    weights, slots = engine.state()
    chain = engine.method.deployed(engine.tree)
    auxiliary = {k.partition("/")[0] for k in weights} - chain
    assert auxiliary == {"0-2", "0-4", "2-4", "4-6"}
    for key, value in parts(before[0], auxiliary).items():
        assert torch.equal(weights[key], value), key
    assert all(not torch.equal(weights[k], v) for k, v in parts(before[0], set(chain)).items())
    counts = {k: float(v) for k, v in slots.items() if k.endswith("/step")}
    assert {v for k, v in counts.items() if k.partition("/")[0] in chain} == {6.0}
    assert {v for k, v in counts.items() if k.partition("/")[0] in auxiliary} == {3.0}


def test_a_finish_along_a_short_path() -> None:
    """Plain gradient descent on the network that the path is; all other parts stay."""
    words = ["finish=1", "finish_path=spine-2", "optimizer=sgd", "momentum=0", "weight_decay=0",
             "lr=0.1", "microbatches=2"]  # fmt: skip
    engine = engine_for(words)
    settings, samples = engine.job.settings, data.load(config.load(SMALL))
    network = TreeNetwork.from_blueprint(
        blueprint(settings, samples.shape), engine.tree, settings.seed
    )
    untouched = network.state_dict()
    untouched = {k: v.clone() for k, v in untouched.items()}
    path, batches = network.path([0, 4, 6, 8]), engine.job.batches()
    for step in range(3):
        engine.step(step, report=False)
        x, y = batches(step)
        torch.nn.functional.cross_entropy(path(x), y).backward()
        for p in path.parameters():
            assert p.grad is not None
            p.data -= 0.1 * p.grad
            p.grad = None
    weights = engine.state()[0]
    for key, value in network.state_dict().items():
        mine = weights[key.removeprefix("edges.").replace(".", "/", 1)]
        assert torch.allclose(mine, value, atol=1e-6), key
        moved = key.removeprefix("edges.").partition(".")[0] in ("0-4", "4-6", "7-8")
        assert torch.equal(mine, untouched[key]) != moved, key
    assert engine.method.stages(engine.job)["finish"]["block_applications_per_step"] == 3
    cost = engine.method.cost(settings, engine.tree)
    assert (cost.work, cost.path) == (6, 6)


@pytest.mark.parametrize(
    ("words", "placement"),
    [
        (["clip=0.05", "microbatches=3", "sigma=0.05"], ["placement=per_node"]),
        (["precision=fp16"], ["placement=per_node"]),
        (["model.group=[2,2,3]", "model.auxiliary_layers=2", "finish_path=spine-2"], ["hosts=2"]),
        ([*GPT, "model.group=2", "model.dropout=0.1", "microbatches=2"], ["hosts=2"]),
        ([*GPT, "finish_from=path", "microbatches=3"], ["placement=per_node"]),
        (
            [*GPT, "model.group=[2,2,3]", "model.auxiliary_layers=3", "finish_from=path"],
            ["hosts=2"],
        ),
        ([*GPT, "microbatches=3"], ["hosts=2"]),  # sums of head and stem, which share weights
    ],
    ids=["nodes", "scaled", "path", "gpt", "grown", "grown_groups", "gpt_pieces"],
)
def test_hosts_apart_are_bitwise_one_process(words: list[str], placement: list[str]) -> None:
    """The hosts of several actors, with tensors handed from one to the other, across the switch."""
    words = [*words, "finish=0.5"]
    engine = engine_for(words)
    kind = [] if "placement=per_node" in placement else ["placement=packed"]
    settings = config.load([*SMALL, *words, *placement, *kind])
    job = methods.job_of(settings, data.load(settings), 6)
    plan = job.method.plan(settings, job.tree, Cluster(((8.0, 0.0),)))
    assert len(plan.names) > 1
    hosts = [job.method.host(job, plan, index) for index in range(len(plan.names))]
    passes = {STEP: job.method.calls(job, plan), **job.method.other_calls(job, plan)}
    for step in range(6):
        engine.step(step, report=False)
        rehearsal.step(hosts, job, passes[job.pass_at(step)], step)
    for mine, theirs in zip(
        zip(*(h.state() for h in hosts), strict=True), engine.state(), strict=True
    ):
        together = {key: value for part in mine for key, value in part.items()}
        assert together.keys() == theirs.keys()
        assert all(torch.equal(together[key], value) for key, value in theirs.items())


def test_which_steps_are_the_last() -> None:
    for finish, total, first in ((0, 8, 8), (0.25, 8, 6), (0.001, 8, 7), (1, 8, 0), (0.1, 30, 27)):
        engine = engine_for([f"finish={finish}"], total)
        passes = [engine.job.pass_at(step) for step in range(total)]
        assert passes == [STEP] * first + [FINISH] * (total - first)


def test_a_probe_in_the_finish_leaves_the_run_alone() -> None:
    engine, plain = engine_for(["finish=0.5"]), engine_for(["finish=0.5"])
    for step in range(5):
        engine.step(step, report=False)
        plain.step(step, report=False)
    assert engine.probe(1, 0)
    for each in (engine, plain):
        each.step(5, report=False)
    assert all(torch.equal(engine.state()[0][k], v) for k, v in plain.state()[0].items())


@pytest.mark.parametrize("stop", [3, 8], ids=["before", "after"])
def test_a_run_is_taken_up_across_the_switch(tmp_path: Path, stop: int) -> None:
    """Stopped in the tree's part or in the finish, it ends as if it had not been."""
    words = [*SMALL, "model.group=2", "steps=9", "finish=0.4", "objective=node",
             "checkpoint_every=2", "schedule=cosine", f"out={tmp_path}"]  # fmt: skip
    expected = Trainer.of(config.load([*words, "name=whole"]))
    summary = expected.train()
    assert summary["stages"] == {
        "tree": {"steps": 5, "block_applications_per_step": 9},
        "finish": {"steps": 4, "block_applications_per_step": 8},
    }
    settings = config.load([*words, "name=parts"])
    with pytest.raises(Stopped):
        Trainer.of(settings, callbacks=[StopAt(stop)]).train()
    again = Trainer.of(settings)
    again.train()
    assert again.start > 0
    assert all(torch.equal(again.weights[k], v) for k, v in expected.weights.items())
    stored = json.loads((tmp_path / "parts" / "summary.json").read_text())
    mean = {"work": 0.6 * 18 + 0.4 * 16, "critical_path": 0.6 * 10 + 0.4 * 16}
    assert stored["cost"] == pytest.approx(mean)


def test_the_number_of_steps_is_settled(tmp_path: Path) -> None:
    """With a finish another number of epochs would move the switch: the run is not taken up."""
    words = [*SMALL, "finish=0.5", "steps=4", f"out={tmp_path}", "name=r"]
    Trainer.of(config.load(words)).train()
    with pytest.raises(UserError, match="steps"):
        Trainer.of(config.load([*words, "steps=6"])).train()


@pytest.mark.parametrize(
    "words",
    [
        ["method=bp"],
        ["method=cff"],
        ["experiment=digits_gru"],
        ["patience=3"],
        ["mc_samples=2", "sigma=0.1", "model.activation=tanh", "alpha=1", "beta=0"],
    ],
    ids=["bp", "cff", "time", "patience", "samples"],
)
def test_what_has_no_finish_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"finish=0\.5"):
        methods.checked(config.load([*words, "finish=0.5"]))


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        UserError, match="finish_path=spine-9: one of spine-1, spine-2, spine-3, full"
    ):
        methods.checked(config.load(["finish=0.5", "finish_path=spine-9"]))
    with pytest.raises(UserError, match="finish_path=spine-1: needs finish"):
        methods.checked(config.load(["finish_path=spine-1"]))
