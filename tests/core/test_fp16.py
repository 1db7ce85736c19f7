"""precision=fp16: a scaled loss, the same gradients; steps that overflow are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import engine_of

from treeprop_ray import config, data, methods
from treeprop_ray.core import optim
from treeprop_ray.core.optim import LossScale
from treeprop_ray.errors import TrainingError, UserError

SMALL = ["model.hidden=8", "batch=32", "model.activation=tanh"]


def engine_for(*words: str) -> Any:
    settings = methods.checked(config.load([*SMALL, *words]))
    return engine_of(settings, data.load(settings), 8)


@pytest.mark.parametrize(
    "words",
    [
        ["beta=0.5", "objective=node_all_ce"],
        ["beta=0.5", "correction=vjp", "sigma=0.05", "microbatches=2", "weights.right=0.5"],
        ["method=bp"],
        ["method=cff", "cff.head_share=0.5"],
    ],
)
def test_gradients_are_those_of_the_loss_itself(words: list[str]) -> None:
    reports = []
    for precision in ("float32", "fp16"):
        engine = engine_for(*words, f"precision={precision}")
        engine.step(0, report=True)
        (report,) = engine.reports()
        reports.append(report)
    whole, half = reports
    for part, value in whole.square_norms.items():
        assert half.square_norms[part] == pytest.approx(value, rel=0.05, abs=1e-9), part
    for place, terms in whole.losses.items():
        assert half.losses[place] == pytest.approx(terms, rel=0.02, abs=1e-4)


def test_a_step_that_overflows_is_left_out_and_the_scale_halves() -> None:
    engine = engine_for("precision=fp16", "method=bp")
    scale = engine.host.optimizer.scale
    before = engine.state()[0]
    scale.value = 2.0**40
    engine.step(0, report=True)
    after = engine.state()[0]
    assert scale.value == 2.0**39
    assert all(torch.equal(after[key], value) for key, value in before.items())
    scale.value = 2.0**10
    engine.step(1, report=True)
    assert any(not torch.equal(engine.state()[0][key], value) for key, value in before.items())


def test_the_scale_doubles_after_many_steps_and_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "GROWTH", 2)
    scale = LossScale(True)
    for fine in (True, False, True, True, True):
        scale.update(fine)
    assert (scale.value, scale.steps) == (2.0**16, 1)
    other = LossScale(True)
    other.load(scale.state())
    assert (other.value, other.steps) == (scale.value, scale.steps)


def test_gradients_that_no_scale_helps_end_the_run() -> None:
    scale = LossScale(True)
    with pytest.raises(TrainingError, match="not finite at any loss scale"):
        for _ in range(20):
            scale.update(False)


def test_a_probe_leaves_the_scale_as_it_is() -> None:
    engine = engine_for("precision=fp16", "sigma=0.05")
    engine.step(0, report=True)
    row = engine.probe(1, 2)
    assert row["norm_bp"] > 0 and engine.host.scale() == 2.0**16
    assert engine.host.half == torch.float16


def test_where_it_is_not_for() -> None:
    with pytest.raises(UserError, match="precision=fp16: is for networks of blocks"):
        methods.checked(config.load(["experiment=digits_gru", "precision=fp16"]))
