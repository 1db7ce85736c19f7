"""The distributed engine gives the local engine's numbers, bit for bit, wherever nodes live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from conftest import engine_of
from warm import warm_ray

from treeprop_ray import config, data
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine import Engine
from treeprop_ray.hosts.base import StepReport
from treeprop_ray.schedule.workload import Part, Workload

STEPS = 5
ROUGH = ["model.activation=tanh", "alpha=1", "beta=0.5", "sigma=0.05", "clip=0.05",
         "microbatches=3", "objective=node_all_ce"]  # fmt: skip
PLAIN = ["alpha=1", "beta=0", "objective=node"]
LITERAL = ["model.activation=tanh", "alpha=0.9", "beta=0.3", "sigma=0.02", "correction=vjp",
           "mc_samples=2", "microbatches=2", "target_gradient=false"]  # fmt: skip
LETTER = [*LITERAL, "input=sample", "ce_at=sample", "reduction=sigma", "levels=finest",
          "correction=clipped", "correction_scale=0.2"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with warm_ray():
        yield


def words_for(N: int, *words: str) -> list[str]:
    return [f"model.blocks={N - 1}", "model.hidden=8", "batch=32", "timeline_steps=1", *words]


def settings_for(N: int, *words: str) -> config.Settings:
    return config.load(words_for(N, *words))


def outcome(engine: Engine) -> tuple[list[list[StepReport]], Any]:
    """Reports of every step and the state after the last."""
    reports = []
    for step in range(STEPS):
        engine.step(step, report=True)
        reports.append(engine.reports())
    return reports, engine.state()


def assert_same(found: Any, expected: Any) -> None:
    """Losses, gradient norms, weights and optimizer state (which holds the gradients) are equal."""
    for step, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        for attribute in ("losses", "square_norms", "sizes"):
            merged: dict[Any, Any] = {}
            for report in mine:
                for key, value in getattr(report, attribute).items():
                    merged.setdefault(key, {}).update(
                        value if isinstance(value, dict) else {"": value}
                    )
            for key, value in getattr(theirs[0], attribute).items():
                assert merged[key] == (value if isinstance(value, dict) else {"": value}), (
                    step,
                    key,
                )
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key


def check(N: int, words: list[str], *placement: str) -> None:
    compare(words_for(N, *words), *placement)


def compare(words: list[str], *placement: str) -> None:
    settings = config.load(words)
    samples = data.load(settings)
    oracle = engine_of(settings, samples, 20)
    expected = outcome(oracle)
    engine = engine_of(config.load([*words, "engine=ray", *placement]), samples, 20)
    try:
        found = outcome(engine)
        scores = engine.score({"full": engine.tree.chain}, "validation")
    finally:
        engine.close()
    assert_same(found, expected)
    assert scores == oracle.score({"full": oracle.tree.chain}, "validation")


@pytest.mark.parametrize(("N", "words"), [(2, ROUGH), (3, LITERAL), (5, LETTER), (8, ROUGH)])
def test_an_actor_per_node_equals_local(N: int, words: list[str]) -> None:
    check(N, words, "placement=per_node")


@pytest.mark.parametrize(
    ("N", "words", "hosts"),
    [
        (2, PLAIN, 1), (3, ROUGH, 2), (5, ROUGH, 3), (8, PLAIN, 1), (8, LITERAL, 2), (13, ROUGH, 2),
        (13, LETTER, 3),
    ],
)  # fmt: skip
def test_packed_hosts_equal_local(N: int, words: list[str], hosts: int) -> None:
    check(N, words, "placement=packed", f"hosts={hosts}")


GPT = ["experiment=text_small", "model.blocks=5", "model.output_block=true", "model.hidden=8",
       "model.heads=2", "data.length=8", "data.limit=64", "batch=6", "microbatches=2", "beta=0.5",
       "model.dropout=0.1", "objective=node_all_ce", "clip=0.5", "split=right_full"]  # fmt: skip


@pytest.mark.parametrize(
    "placement", [["placement=per_node"], ["placement=packed", "hosts=2"]], ids=["nodes", "packed"]
)
def test_tied_weights_equal_local(placement: list[str]) -> None:
    """A language model: the head uses the stem's token table, both live in the boundary."""
    compare(GPT, *placement)


@pytest.mark.parametrize(
    ("words", "placement"),
    [
        ([*ROUGH, "model.blocks=7", "model.hidden=8", "batch=32"], ["placement=per_node"]),
        ([*GPT, "model.blocks=8", "finish_from=path"], ["placement=packed", "hosts=2"]),
        (
            [
                *GPT,
                "model.blocks=8",
                "model.group=[2,2,3]",
                "model.auxiliary_layers=2",
                "finish_path=spine-2",
            ],
            ["placement=packed", "hosts=2"],
        ),
    ],
    ids=["nodes", "grown", "groups"],
)
def test_a_finish_by_backpropagation_equals_local(words: list[str], placement: list[str]) -> None:
    """Three steps of the tree, two of a path over the same actors, of which some have none of its
    blocks; tied weights and several layers in a block."""
    compare([*words, "finish=0.85"], *placement)


def test_fewer_levels_and_sweeps_of_the_chain_equal_local() -> None:
    """Two steps of the tree, one without its finest level, two of the chain by sweeps."""
    words = [*GPT, "model.blocks=8", "beta=0", "coarsen=[0.1]", "finish=0.85", "finish_sweeps=2"]
    compare(words, "placement=packed", "hosts=2")


def test_bf16_travels_as_bf16() -> None:
    words = [*PLAIN, "model.activation=tanh", "precision=bf16", "sigma=0.01"]
    check(5, words, "placement=packed", "hosts=2")


@pytest.mark.parametrize("hosts", [1, 3])
def test_the_chain_of_actors_equals_backpropagation(hosts: int) -> None:
    check(8, ["method=bp", "microbatches=4", "clip=0.1"], "placement=packed", f"hosts={hosts}")


@pytest.mark.parametrize(
    ("N", "words", "placement"),
    [
        (3, ROUGH, ["placement=per_node"]),
        (8, LITERAL, ["placement=packed", "hosts=2"]),
        (4, LETTER, ["placement=per_node"]),
    ],
)
def test_a_probe_on_actors_measures_and_leaves_what_the_local_one_does(
    N: int, words: list[str], placement: list[str]
) -> None:
    samples = data.load(config.load([]))
    oracle = engine_of(settings_for(N, *words), samples, 20)
    engine = engine_of(settings_for(N, *words, "engine=ray", *placement), samples, 20)
    try:
        for step in range(2):
            oracle.step(step, report=False)
            engine.step(step, report=False)
        expected, found = oracle.probe(2, 3), engine.probe(2, 3)
        engine.step(2, report=False)
        state = engine.state()
    finally:
        engine.close()
    assert found == pytest.approx(expected, rel=1e-11, nan_ok=True)
    plain = engine_of(settings_for(N, *words), samples, 20)
    for step in range(3):
        plain.step(step, report=False)
    for mine, theirs in zip(state, plain.state(), strict=True):
        assert all(torch.equal(mine[k], v) for k, v in theirs.items())


def test_the_cff_chain_equals_one_process_even_when_an_actor_dies(cold_actors: None) -> None:
    """Two stages of training, the weights kept in between, three steps in flight."""
    words = ["method=cff", "clip=0.1", "cff.head_share=0.5", "data.augment=crop_flip"]
    samples = data.load(settings_for(6, *words))
    oracle = engine_of(settings_for(6, *words), samples, 10)
    ray_words = ["engine=ray", "placement=packed", "hosts=2", "in_flight=3"]
    engine = engine_of(settings_for(6, *words, *ray_words), samples, 10)
    try:
        for step in range(8):
            oracle.step(step, report=True)
            engine.step(step, report=True)
            if step in (1, 6):  # before the layers are validated, and after
                ray.kill(engine.driver.actors[1])
            if step == 4:
                assert engine.reports()[-1].losses == oracle.reports()[-1].losses
        for mine, theirs in zip(engine.state(), oracle.state(), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[k], v) for k, v in theirs.items())
        assert engine.recovery.failures == 2
        full = {"full": engine.tree.chain}
        assert engine.score(full, "test") == oracle.score(full, "test")
    finally:
        engine.close()


def test_several_steps_in_flight_change_nothing() -> None:
    samples = data.load(config.load([]))
    expected = engine_of(settings_for(5, *ROUGH), samples, 20)
    engine = engine_of(
        settings_for(5, *ROUGH, "engine=ray", "hosts=2", "placement=packed", "in_flight=4"),
        samples,
        20,
    )
    try:
        for step in range(10):
            expected.step(step, report=False)
            engine.step(step, report=False)
            assert len(engine.driver.flight) <= 4
        for mine, theirs in zip(engine.state(), expected.state(), strict=True):
            assert all(torch.equal(mine[k], v) for k, v in theirs.items())
    finally:
        engine.close()


def test_state_moves_between_engines_and_placements() -> None:
    """A checkpoint is keyed by edge: saved on two actors, it goes on in none and in three."""
    samples = data.load(config.load([]))
    words = [*ROUGH, "engine=ray", "placement=packed"]
    two = engine_of(settings_for(8, *words, "hosts=2"), samples, 20)
    try:
        for step in range(3):
            two.step(step, report=False)
        saved = two.state()
    finally:
        two.close()
    alone = engine_of(settings_for(8, *ROUGH), samples, 20)
    three = engine_of(settings_for(8, *words, "hosts=3"), samples, 20)
    try:
        for engine in (alone, three):
            engine.load(saved)
            engine.step(3, report=False)
        for mine, theirs in zip(three.state(), alone.state(), strict=True):
            assert all(torch.equal(mine[k], v) for k, v in theirs.items())
    finally:
        three.close()


def test_auto_plans_copies_that_give_the_weights_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks of a second: two copies halve the step, and microbatches=2 is what they add up."""
    slow = Workload.even(Tree(5), 32, Part(0.0, 1 / 32), Part(), 0.0)
    monkeypatch.setattr("treeprop_ray.methods.auto.workload", lambda *words: slow)
    words = [*PLAIN, "microbatches=2", "sigma=0.05", "model.activation=tanh"]
    samples = data.load(config.load([]))
    alone = engine_of(settings_for(5, *words), samples, 20)
    spread = engine_of(settings_for(5, *words, "engine=ray"), samples, 20)
    try:
        assert (spread.plan.copies, len(spread.plan.names)) == (2, 1)
        assert "placement=auto: 1 host x 2 copies" in capsys.readouterr().out
        (mine, _), (theirs, _) = (outcome(engine)[1] for engine in (spread, alone))
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    finally:
        spread.close()


def alive() -> set[str]:
    actors = ray._private.state.actors().items()
    return {key for key, actor in actors if actor["State"] == "ALIVE"}


def test_no_actor_is_left_after_close(cold_actors: None) -> None:
    samples = data.load(config.load([]))
    before = alive()  # the warm ones of other tests
    engine = engine_of(settings_for(3, "engine=ray"), samples, 20)
    assert alive() > before
    engine.close()
    assert alive() <= before
    assert ray.is_initialized()  # it was running before, so it is left running
