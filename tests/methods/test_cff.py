"""CFF+M: the loss is its definition, layers are alone, two stages, resume, actors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import Result, StopAt, Stopped, engine_of, local_engine, tiny_batches, tiny_network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treeprop_ray import config
from treeprop_ray.core.contrast import contrastive_loss, margin_at
from treeprop_ray.core.network import edge_of
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import Rule
from treeprop_ray.data import Batches, load
from treeprop_ray.methods.cff import ForwardForward
from treeprop_ray.run import checkpoint
from treeprop_ray.run.trainer import Trainer

Command = Callable[..., Result]
SMALL = ["model.hidden=12", "model.blocks=3", "batch=64", "log_every=5", "method=cff"]


def by_definition(z: Tensor, y: list[int], margin: float, tau: float) -> tuple[Tensor, float]:
    """Row by row and pair by pair, as the definition reads."""
    z = z.mean(1) if z.dim() == 3 else z
    z = z / z.norm(dim=1, keepdim=True)
    total, clamped, pairs = torch.zeros((), dtype=z.dtype), 0, 0

    def t(i: int, j: int) -> Tensor:
        s = z[i] @ z[j]
        return torch.minimum(s + margin, torch.ones_like(s)) if y[i] == y[j] else s

    for i in range(len(y)):
        others = [k for k in range(len(y)) if k != i]
        positives = [j for j in others if y[j] == y[i]]
        for j in positives:
            scale = sum(torch.exp(t(i, k) / tau) for k in others)
            total = total - (t(i, j) / tau - torch.log(torch.as_tensor(scale))) / len(positives)
            pairs += 1
            clamped += int(z[i] @ z[j] + margin > 1)
    return total / len(y), clamped / max(1, pairs)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000), st.integers(2, 7), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.4, 2]),
    st.sampled_from([0.07, 0.15, 1.0]), st.booleans(),
)  # fmt: skip
def test_the_loss_and_its_gradient_are_the_definition(
    seed: int, rows: int, classes: int, margin: float, tau: float, tokens: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 3, 4) if tokens else (rows, 4)
    z = torch.randn(shape, generator=generator, dtype=torch.float64).abs()
    y = torch.randint(0, classes, (rows,), generator=generator)
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    found, share = contrastive_loss(a, y, margin, tau)
    expected, expected_share = by_definition(b, y.tolist(), margin, tau)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert math.isclose(float(share), expected_share, abs_tol=1e-6)
    found.backward()
    if expected.requires_grad:
        expected.backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-10)


def test_a_clamped_pair_does_not_pull() -> None:
    """Two positives within the margin of 1: raising them further changes nothing."""
    z = torch.tensor([[1.0, 0.02], [1.0, 0.0], [0.0, 1.0], [0.3, 1.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 1])
    plain, none = contrastive_loss(z, y, 0.0, 0.15)
    raised, half = contrastive_loss(z, y, 0.01, 0.15)  # s = 0.9998 and 0.958
    assert float(none) == 0 and float(half) == 0.5
    assert raised < plain
    big, all_ = contrastive_loss(z, y, 0.5, 0.15)
    bigger, _ = contrastive_loss(z, y, 1.5, 0.15)
    assert float(all_) == 1 and torch.equal(big, bigger)


def test_margins_fall_from_first_to_last() -> None:
    for kind, middle in (("linear", 0.25), ("parabolic", 0.175), ("cosine", 0.25)):
        margins = [margin_at(l, 5, kind, 0.4, 0.1) for l in range(5)]
        assert margins[0] == pytest.approx(0.4) and margins[-1] == pytest.approx(0.1)
        assert margins == sorted(margins, reverse=True)
        assert margins[2] == pytest.approx(middle)
    assert margin_at(0, 1, "cosine", 0.4, 0.1) == pytest.approx(0.4)


def tiny_engine(N: int = 4, first: int = 3, total: int = 6) -> Any:
    rule = OptimizerRule(lr=0.01, total_steps=total, clip_each=True, second=(first, 0.02))
    return local_engine(tiny_network(N), Rule(), rule, tiny_batches(), method="cff")


def test_no_gradient_crosses_a_layer() -> None:
    """A layer's gradient is that of its own loss alone, on a detached input."""
    engine = tiny_engine()
    engine.gradients(0)
    parts = {edge_of(name): part for name, part in engine.host.parts.items()}
    found = {e: [p.grad for p in m.parameters()] for e, m in parts.items()}
    x, y = engine.host.batches(0)
    z, rows = torch.cat([x, x]), torch.cat([y, y])
    for r, margin in ((1, 0.4), (2, 0.25), (3, 0.1)):
        layer = [*([parts[-1, 0]] if r == 1 else []), parts[r - 1, r]]
        for module in layer:
            z = module(z)
        params = [p for module in layer for p in module.parameters()]
        loss, _ = contrastive_loss(z, rows, margin, 0.15)
        edges = [(-1, 0), (0, 1)] if r == 1 else [(r - 1, r)]
        mine = [g for e in edges for g in found[e]]
        for a, b in zip(mine, torch.autograd.grad(loss, params), strict=True):
            torch.testing.assert_close(a, b)
        z = z.detach()
    assert all(g is None for g in found[3, 4])


def test_stage_two_freezes_the_layers_at_the_kept_weights_and_trains_the_head() -> None:
    engine = tiny_engine()  # one step per epoch: validated after each of the steps 1, 2, 3
    seen = []
    for step in range(3):
        engine.step(step, report=True)
        weights = {k: v for k, v in engine.state()[0].items() if not k.startswith("3-4")}
        seen.append((engine.reports()[-1].losses[3]["validation"], weights))
    assert len({loss for loss, _ in seen}) == 3
    head = engine.state()[0]["3-4/weight"]
    best = min(seen, key=lambda entry: entry[0])[1]
    for step in range(3, 6):
        engine.step(step, report=True)
        assert set(engine.reports()[0].losses) == {4}
    after = engine.state()[0]
    assert all(torch.equal(after[k], v) for k, v in best.items())
    assert not torch.equal(after["3-4/weight"], head)


def test_the_weights_of_the_lowest_validation_loss_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny_engine()
    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(ForwardForward, "validation", lambda self, crew: next(losses))
    for step in range(2):
        engine.step(step, report=False)
    second = engine.state()[0]["1-2/linear.weight"]
    engine.step(2, report=False)
    assert not torch.equal(engine.state()[0]["1-2/linear.weight"], second)
    engine.step(3, report=False)
    assert torch.equal(engine.state()[0]["1-2/linear.weight"], second)


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_chain_of_hosts_equals_one(hosts: int) -> None:
    """Two layers and the head of a ViT, cut at every border (4: the head alone), both stages."""
    from treeprop_ray.benchmarks import rehearsal
    from treeprop_ray.benchmarks.random_data import random_images, random_job
    from treeprop_ray.benchmarks.step_ray import BASE
    from treeprop_ray.schedule.cluster import Cluster

    words = [*BASE, "method=cff", "model.hidden=12", "model.blocks=3", "batch=8", "clip=0.5",
             "placement=packed", f"hosts={min(hosts, 3)}"]  # fmt: skip
    settings_ = config.load(words)
    job = replace(
        random_job(settings_, random_images()),
        optimizer=OptimizerRule(clip_each=True, clip=0.5, total_steps=4, second=(2, 0.1)),
    )
    results = []
    for count in (1, hosts):
        plan = job.method.plan(settings_, job.tree, Cluster(((4.0, 0.0),)))
        plan = replace(plan, names=tuple(f"x/{k}" for k in range(count)))
        hosts_ = [job.method.host(job, plan, k) for k in range(count)]
        for step in range(4):
            rehearsal.step(hosts_, job, job.method.calls(job, plan), step)
        results.append({k: v for host in hosts_ for k, v in host.state()[0].items()})
    one, many = results
    assert one.keys() == many.keys() and all(torch.equal(one[k], many[k]) for k in one)


def test_learning_rates_of_the_two_stages() -> None:
    rule = OptimizerRule(lr=1.0, schedule="linear", total_steps=10, second=(4, 0.1))
    assert rule.lr_at(0) == 1.0 and rule.lr_at(3) == pytest.approx(0.25)
    assert rule.lr_at(4) == 0.1 and rule.lr_at(9) == pytest.approx(0.1 / 6)


@pytest.mark.parametrize("stop", [31, 55], ids=["layers", "head"])
def test_stop_and_resume_is_bitwise_one_run(command: Command, tmp_path: Path, stop: int) -> None:
    """60 steps, 50 of them for the layers; stopped in either stage."""
    words = [*SMALL, f"out={tmp_path}", "epochs=3", "clip=0.5", "schedule=cosine",
             "checkpoint_every=7"]  # fmt: skip
    assert command("train", *words, "name=whole").code == 0

    with pytest.raises(Stopped):
        Trainer.of(config.load([*words, "name=cut"]), callbacks=[StopAt(stop)]).train()
    again = command("train", *words, "name=cut")
    assert again.code == 0 and "continuing from" in again.out
    whole, cut_ = (checkpoint.newest(tmp_path / n / "checkpoints") for n in ("whole", "cut"))
    assert whole and cut_ and whole.meta["step"] == cut_.meta["step"] == 60
    for a, b in ((whole.weights, cut_.weights), (whole.optimizer, cut_.optimizer)):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    frames = [pd.read_csv(tmp_path / n / "metrics.csv") for n in ("whole", "cut")]
    a, b = (f.drop(columns=["step_seconds", "data_share"]) for f in frames)
    pd.testing.assert_frame_equal(a, b)
    assert a["clamped/1"].notna().any() and a["validation/3"].notna().sum() == 3
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["stages"]["layers"] == {"steps": 50, "block_applications_per_step": 6}
    assert summary["parameters_trained"] == summary["parameters_deployed"]
    assert command("evaluate", f"run={tmp_path / 'whole'}").code == 0
    assert command("export", f"run={tmp_path / 'whole'}", f"to={tmp_path / 'x'}").code == 0


def test_a_vision_transformer_trains_and_its_stem_learns(command: Command, tmp_path: Path) -> None:
    words = ["method=cff", "model.name=vit", "model.hidden=8", "model.heads=2", "model.blocks=2",
             "model.patch=4", "steps=6", "batch=32", "data.augment=crop_flip", "model.dropout=0.1",
             f"out={tmp_path}", "name=v"]  # fmt: skip
    assert command("train", *words).code == 0
    settings = config.load(words)
    fresh, _ = engine_of(settings, load(settings), 6).state()
    found = checkpoint.newest(tmp_path / "v" / "checkpoints")
    assert found is not None
    for part in ("stem", "0-1", "1-2", "2-3"):
        moved = [
            k for k in fresh if k.startswith(part) and not torch.equal(fresh[k], found.weights[k])
        ]
        assert moved, part


def test_views_differ_when_images_are_augmented() -> None:
    batches = Batches(load(config.load(["data.augment=crop_flip"])), 16, 1)
    (x0, y0), (x1, y1) = batches(0), batches(0, 1)
    assert torch.equal(y0, y1) and not torch.equal(x0, x1)
    assert torch.equal(x1, batches(0, 1)[0])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["method=cff", "microbatches=2"], "microbatches=2"),
        (["method=cff", "cff.margin=steep"], "cff.margin=steep"),
        (["method=cff", "cff.tau=0"], "cff.tau=0"),
        (["experiment=digits_gru", "method=cff"], "method=cff"),
    ],
)
def test_bad_settings_are_one_line(command: Command, words: list[str], key: str) -> None:
    result = command("train", *words)
    assert result.code == 2 and len(result.error_lines) == 1 and key in result.err
