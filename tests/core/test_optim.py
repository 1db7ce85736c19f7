"""The learning rate of every step, and which part owns a tensor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from treeprop_ray.core.optim import OptimizerRule, PartOptimizer, global_norm


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
