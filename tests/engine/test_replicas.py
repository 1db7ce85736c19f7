"""replicas=R: copies of all actors share the batch, and give the weights of R times as many
micro-batches in one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import engine_of
from hypothesis import example, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from in_process import InProcess

from treeprop_ray import config, data, methods
from treeprop_ray.engine.base import Engine
from treeprop_ray.errors import UserError

STEPS = 3
Outcome = tuple[list[Any], Any, Any]

GPT = ["experiment=text_small", "model.output_block=true", "model.hidden=8", "model.heads=2",
       "data.length=6", "data.limit=64", "batch=7", "model.dropout=0.2", "split=right_full",
       "model.init_std=0.2"]  # fmt: skip
MLP = ["model.hidden=8", "batch=13", "data.limit=200", "model.activation=tanh"]
TIME = ["experiment=digits_gru", "model.hidden=5", "time.depth=3", "batch=9", "data.limit=200"]


def outcome(engine: Engine) -> Outcome:
    """Losses and norms of every step, the state after the last, a score."""
    reports = []
    for step in range(STEPS):
        engine.step(step, report=True)
        losses: dict[int, dict[str, float]] = {}
        norms: dict[str, float] = {}
        for report in engine.reports():
            for place, terms in report.losses.items():
                losses.setdefault(place, {}).update(terms)
            norms |= report.square_norms
        reports.append((losses, norms))
    return reports, engine.state(), engine.score({"full": engine.tree.chain}, "validation")


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key


def compare(
    words: list[str], replicas: int, pieces: int, *more: str, make: Callable[[Any], Engine]
) -> None:
    """An engine with copies, and one process with as many more micro-batches."""
    settings = config.load([*words, f"microbatches={replicas * pieces}"])
    samples = data.load(settings)
    expected = outcome(engine_of(settings, samples, 20))
    copies = [f"replicas={replicas}", f"microbatches={pieces}", "engine=ray", *more]
    chosen = methods.checked(config.load([*words, *copies]))
    engine = make(methods.job_of(chosen, samples, 20))
    try:
        found = outcome(engine)
    finally:
        engine.close()
    assert_same(found, expected)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[str], int, int, list[str]]:
    """(the run, copies, micro-batches of each, where it runs)."""
    N, R = draw(st.sampled_from([2, 5, 8, 13])), draw(st.integers(1, 4))
    gpt = draw(st.booleans())
    words = [*GPT, f"model.blocks={N}"] if gpt else [*MLP, f"model.blocks={N - 1}"]
    pieces = draw(st.integers(1, 7 // R if gpt else 3))
    words += [f"clip={draw(st.sampled_from([0.0, 0.05]))}"]
    bp = draw(st.integers(0, 3)) == 0 and not gpt
    words += ["method=bp"] if bp else [
        f"sigma={draw(st.sampled_from([0.0, 0.05]))}",
        f"beta={draw(st.sampled_from([0.0, 0.4]))}",
        f"objective={draw(st.sampled_from(['node', 'node_all_ce', 'final_ce']))}",
        f"target_gradient={draw(st.sampled_from(['true', 'false']))}",
    ]  # fmt: skip
    hosts = draw(st.integers(0, min(3, N - 1)))  # 0: an actor per node
    packed = bp or hosts
    place = ["placement=packed", f"hosts={max(1, hosts)}"] if packed else ["placement=per_node"]
    shard = [f"shard_optimizer={draw(st.sampled_from(['true', 'false']))}"] if R > 1 else []
    return words, R, pieces, [*place, *shard]


@given(cases())
@example(([*GPT, "model.blocks=8", "clip=0.05", "beta=0.4", "objective=node_all_ce"], 3, 2,
          ["placement=packed", "hosts=2", "shard_optimizer=true"]))  # fmt: skip
@limits(max_examples=25, deadline=None)
def test_copies_equal_micro_batches(case: tuple[list[str], int, int, list[str]]) -> None:
    words, replicas, pieces, more = case
    compare(words, replicas, pieces, *more, make=InProcess)


@pytest.mark.parametrize(
    "words",
    [
        ["mc_samples=3", "sigma=0.1"],
        ["accumulate=2", "shard_optimizer=true"],
        ["precision=fp16", "clip=0.1"],
        ["optimizer=muon", "shard_optimizer=true"],
        ["optimizer=sgd", "freeze=[0..2]"],
        ["correction=vjp", "beta=0.3"],
        ["loss.class_weights=[1,2,3,4,5,6,7,8,9,10]"],
    ],
)
def test_whatever_the_run(words: list[str]) -> None:
    copies = [w for w in words if w.startswith("shard")]
    run = [w for w in words if w not in copies]
    run = [*MLP, "model.blocks=4", "objective=node_all_ce", *run]
    compare(run, 3, 2, "placement=packed", "hosts=2", *copies, make=InProcess)


@pytest.mark.parametrize("words", [["time.sweeps=2"], ["time.recipe=lookahead", "time.sweeps=0"]])
@pytest.mark.parametrize("shard", ["true", "false"])
def test_through_time(words: list[str], shard: str) -> None:
    compare([*TIME, *words], 3, 2, f"shard_optimizer={shard}", make=InProcess)
