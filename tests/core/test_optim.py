"""The optimizer: learning rates, norms, groups, one's own; its state goes out and in by part."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from conftest import engine_of
from torch import nn

from treeprop_ray import config, data
from treeprop_ray.core.optim import PartOptimizer, global_norm
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
SMALL = ["model.hidden=8", "batch=32"]
OWN = "own_optim"


def test_the_rate_rises_in_equal_steps_and_is_whole_at_the_end_of_the_warm_up() -> None:
    rule = OptimizerRule(lr=0.5, warmup=0.2, total_steps=20)
    assert [rule.lr_at(step) for step in range(5)] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_linear_and_cosine_fall_from_the_whole_rate_to_nothing() -> None:
    for schedule, half in (("linear", 0.5), ("cosine", 0.5)):
        rule = OptimizerRule(lr=1.0, schedule=schedule, warmup=0.2, total_steps=100)
        assert rule.lr_at(20) == pytest.approx(1.0)  # the first step after the warm-up
        assert rule.lr_at(60) == pytest.approx(half)
        assert rule.lr_at(100) == pytest.approx(0.0, abs=1e-12)
        rates = [rule.lr_at(step) for step in range(20, 101)]
        assert rates == sorted(rates, reverse=True)
    quarter = OptimizerRule(schedule="cosine", lr=1.0, total_steps=4).lr_at(1)
    assert quarter == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_a_tensor_of_two_parts_is_updated_once_and_counted_once() -> None:
    stem, head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    head.weight = stem.weight
    rule = OptimizerRule(kind="sgd", lr=1.0, momentum=0.0)
    optimizer = PartOptimizer({"3-4": head, "stem": stem}, rule, first="stem")
    before = stem.weight.detach().clone()
    stem.weight.grad = torch.ones(2, 2)
    assert optimizer.square_norms() == {"stem": 4.0}
    optimizer.step(0, None)
    assert torch.equal(head.weight.detach(), before - 1)


def test_the_global_norm_does_not_depend_on_who_tells_it() -> None:
    norms = {f"{k}-{k + 1}": 0.1 * k for k in range(9)}
    one = global_norm([norms])
    two = global_norm([dict(list(norms.items())[5:]), dict(list(norms.items())[:5])])
    assert one == two == math.sqrt(sum(norms[k] for k in sorted(norms)))


@pytest.mark.parametrize(("each", "moved"), [(False, (3.0, 4.0)), (True, (5.0, 5.0))])
def test_clipping_shrinks_to_the_norm_of_all_parts_or_of_each(
    each: bool, moved: tuple[float, float]
) -> None:
    parts = {name: nn.Linear(1, 1, bias=False) for name in ("0-1", "1-2")}
    rule = OptimizerRule(kind="sgd", lr=1.0, momentum=0.0, clip=5.0, clip_each=each)
    optimizer = PartOptimizer(parts, rule)
    before = {name: part.weight.item() for name, part in parts.items()}
    for part, gradient in zip(parts.values(), (30.0, 40.0), strict=True):  # their norm is 50
        part.weight.grad = torch.full((1, 1), gradient)
    optimizer.step(0, [optimizer.square_norms()])
    steps = [before[name] - part.weight.item() for name, part in parts.items()]
    assert steps == pytest.approx(moved, rel=1e-5)


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer=muon", "betas=[0.8,0.9]"],
        [f"optimizer={OWN}:nadam"],
        [f"optimizer={OWN}:adafactor", "clip=0.1"],
        [f"optimizer={OWN}:counting"],
        ["optimizer=sgd", "momentum=0"],
        ["decay_norms=false", "weight_decay=0.5", "chain_lr=2", f"schedule={OWN}:halves"],
    ],
)
def test_a_state_that_was_stored_goes_on_as_if_it_had_not(words: list[str]) -> None:
    settings = config.load([*SMALL, *words])
    samples = data.load(settings)
    first, second = (engine_of(settings, samples, 6) for _ in range(2))
    for step in range(3):
        first.step(step, report=True)
    second.load(first.state(), 3)
    for step in range(3, 6):
        first.step(step, report=True)
        second.step(step, report=True)
    for mine, theirs in zip(second.state(), first.state(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())


def test_muon_is_for_the_matrices_of_blocks() -> None:
    settings = config.load([*SMALL, "optimizer=muon"])
    engine = engine_of(settings, data.load(settings), 6)
    engine.step(0, report=True)
    slots = {key.rpartition("/")[0] for key in engine.state()[1] if key.endswith("momentum_buffer")}
    weights = {k for k, v in engine.state()[0].items() if v.ndim == 2}
    assert slots == weights - {"7-8/weight"} and slots


def test_norms_and_biases_may_be_without_weight_decay() -> None:
    """At learning rates near 0 Adam's step vanishes; with a large decay only decay is left."""
    words = [*SMALL, "lr=1e-12", "weight_decay=1e11", "steps=1"]
    changes = {}
    for decay in ("true", "false"):
        settings = config.load([*words, f"decay_norms={decay}"])
        engine = engine_of(settings, data.load(settings), 1)
        before = engine.state()[0]
        engine.step(0, report=True)
        after = engine.state()[0]
        shrunk = {k for k, v in after.items() if (v - before[k]).abs().max() > 1e-3}
        changes[decay] = shrunk
    assert any("bias" in key for key in changes["true"])
    assert changes["false"] == {key for key in changes["true"] if "bias" not in key}


def test_an_own_schedule_is_a_factor_on_lr() -> None:
    rule = OptimizerRule(lr=2.0, schedule=f"{OWN}:halves", total_steps=4)
    assert [rule.lr_at(step) for step in range(4)] == [2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([f"optimizer={OWN}:nothing"], "gives NoneType, must give a torch.optim.Optimizer"),
        ([f"optimizer={OWN}:flat"], "is not over the groups that the factory is given"),
        ([f"optimizer={OWN}:closed"], r"step\(\) failed: TypeError: LBFGS"),
        (["optimizer=nowhere:adam"], "cannot be imported: ModuleNotFoundError"),
        (["optimizer=lion"], "one of adamw, adam, sgd, muon, or package.module:factory"),
        ([f"schedule={OWN}:negative"], "gives -1.0 at step 0; must be at least 0"),
        ([f"schedule={OWN}:halves", "warmup=0.1"], "gives the whole curve; use 0"),
        (["betas=[0.9,1]"], "two numbers from 0 to below 1"),
        (["betas=0.9"], r"betas=0.9: a list such as \[0.9\]"),
        (["optimizer=sgd", "betas=[0.8,0.9]"], "is for optimizer=adamw, adam or muon, not sgd"),
        (["eps=0"], "eps=0.0: must be greater than 0"),
    ],
)
def test_mistakes_are_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        settings = config.load([*SMALL, *words])
        engine_of(settings, data.load(settings), 6)


def test_state_that_belongs_to_no_part_is_refused() -> None:
    settings = config.load([*SMALL, f"optimizer={OWN}:grouped"])
    engine = engine_of(settings, data.load(settings), 6)
    engine.step(0, report=True)
    with pytest.raises(UserError, match="keeps k in its parameter groups"):
        engine.state()


def test_accumulated_batches_are_one_large_batch_in_pieces() -> None:
    states = []
    for words in (["batch=16", "accumulate=4"], ["batch=64", "microbatches=4"]):
        settings = config.load(["model.hidden=8", "beta=0.5", "alpha=0.5", *words])
        engine = engine_of(settings, data.load(settings), 6)
        for step in range(30):  # more than an epoch
            engine.step(step, report=False)
        states.append(engine.state())
    for mine, theirs in zip(*states, strict=True):
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())
