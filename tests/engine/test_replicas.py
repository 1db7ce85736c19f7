"""replicas=R: copies of all actors share the batch, and give the weights of R times as many
micro-batches in one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from conftest import engine_of
from hypothesis import example, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from in_process import InProcess

from treeprop_ray import config, data, engine, methods
from treeprop_ray.engine.base import Engine
from treeprop_ray.errors import UserError

STEPS = 3
Outcome = tuple[list[Any], Any, Any]

GPT = ["experiment=text_small", "model.output_block=true", "model.hidden=8", "model.heads=2",
       "data.length=6", "data.limit=64", "batch=7", "model.dropout=0.2", "split=right_full",
       "model.init_std=0.2"]  # fmt: skip
MLP = ["model.hidden=8", "batch=13", "data.limit=200", "model.activation=tanh"]
TIME = ["experiment=digits_gru", "model.hidden=5", "time.depth=3", "batch=9", "data.limit=200"]


def outcome(crew: Engine) -> Outcome:
    """Losses and norms of every step, the state after the last, a score."""
    reports = []
    for step in range(STEPS):
        crew.step(step, report=True)
        losses: dict[int, dict[str, float]] = {}
        norms: dict[str, float] = {}
        for report in crew.reports():
            for place, terms in report.losses.items():
                losses.setdefault(place, {}).update(terms)
            norms |= report.square_norms
        reports.append((losses, norms))
    return reports, crew.state(), crew.score({"full": crew.tree.chain}, "validation")


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
    crew = make(methods.job_of(chosen, samples, 20))
    try:
        found = outcome(crew)
    finally:
        crew.close()
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
        f"input={draw(st.sampled_from(['mean', 'sample']))}",
        f"ce_at={draw(st.sampled_from(['mean', 'sample']))}",
    ]  # fmt: skip
    hosts = draw(st.integers(0, min(3, N - 1)))  # 0: an actor per node
    packed = bp or hosts
    place = ["placement=packed", f"hosts={max(1, hosts)}"] if packed else ["placement=per_node"]
    shard = [f"shard_optimizer={draw(st.sampled_from(['true', 'false']))}"] if R > 1 else []
    return words, R, pieces, [*place, *shard]


@given(cases())
@example(([*GPT, "model.blocks=8", "clip=0.05", "beta=0.4", "objective=node_all_ce"], 3, 2,
          ["placement=packed", "hosts=2", "shard_optimizer=true"]))  # fmt: skip
@example(
    ([*MLP, "model.blocks=4", "clip=0.05", "objective=final_ce"], 1, 1, ["placement=per_node"])
)  # blocks without a gradient have nothing to clip
@limits(max_examples=10, deadline=None)
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


# -- on Ray ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    from treeprop_ray.engine import runtime

    runtime.start(config.RaySettings(num_cpus=2))
    yield
    runtime.stop()


ROUGH = [*MLP, "model.blocks=4", "objective=node_all_ce", "beta=0.4", "sigma=0.05"]


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (ROUGH, ["hosts=2"]),
        ([*GPT, "model.blocks=4", "clip=0.05"], ["hosts=2", "transport=stream",
                                                 "shard_optimizer=true"]),
    ],
)  # fmt: skip
def test_copies_of_actors(local_ray: None, words: list[str], more: list[str]) -> None:
    compare(words, 2, 1, "placement=packed", *more, make=engine.RayEngine)


def test_a_lost_copy_is_made_anew(local_ray: None) -> None:
    settings = config.load([*ROUGH, "microbatches=2"])
    samples = data.load(settings)
    expected = outcome(engine_of(settings, samples, 20))
    copies = ["replicas=2", "shard_optimizer=true", "engine=ray", "placement=packed", "hosts=1"]
    with_copies = config.load([*ROUGH, *copies, "snapshot_every=1"])
    found = engine_of(with_copies, samples, 20)
    try:
        found.step(0, report=True)
        found.reports()
        ray.kill(found.driver.actors[1])
        for step in range(1, STEPS):
            found.step(step, report=True)
        found.reports()
        state = found.state()
    finally:
        found.close()
    for mine, theirs in zip(state, expected[1], strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


# -- what is refused, what is read -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replicas=2", "method=cff"], "replicas=2: method=cff compares all samples"),
        (["replicas=2", "engine=train", "method=bp"], "replicas=2: engine=train has `hosts`"),
        (["shard_optimizer=true"], "shard_optimizer=true: is about copies; needs replicas"),
        (["reduce=fast"], "reduce=fast: is about copies; needs replicas"),
        (["reduce=fast", "replicas=2"], "reduce=fast: one process has one order"),
        (["replicas=9", "microbatches=2", "batch=16"], "replicas=9 microbatches=2: more pieces"),
        ([*TIME, "replicas=2", "time.shards=2", "engine=ray"], "replicas=2: time.shards=2"),
    ],
)
def test_what_copies_cannot_do(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        methods.checked(config.load(words))


def in_process(*words: str) -> InProcess:
    settings = config.load([*words, "engine=ray", "placement=packed", "hosts=1"])
    return InProcess(methods.job_of(methods.checked(settings), data.load(settings), 20))


def test_running_statistics_are_refused() -> None:
    crew = in_process("replicas=2", "model.blocks=2", "model.hidden=4", "data.limit=100")
    part = crew.hosts[0].parts["0-1"]
    part.register_buffer("mean", torch.zeros(2))
    crew.hosts[0].load(*crew.hosts[0].state())  # a buffer that stands still is no matter
    crew.step(0, report=True)
    part.mean += 1  # type: ignore[operator]
    with pytest.raises(UserError, match=r"^replicas=2: buffer mean of block 0-1 changes"):
        crew.step(1, report=True)


def test_fast_adds_up_each_copy_first() -> None:
    """Close to the exact sums, but not the same; the copies agree with each other."""
    words = [*MLP, "model.blocks=4", "replicas=2", "microbatches=3", "optimizer=sgd"]
    exact, fast = in_process(*words), in_process(*words, "reduce=fast")
    for crew in (exact, fast):
        for step in range(STEPS):
            crew.step(step, report=True)
    weights, others = exact.state()[0], fast.state()[0]
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value)
    assert any(not torch.equal(others[key], value) for key, value in weights.items())
    for name, module in fast.hosts[0].parts.items():
        for mine, theirs in zip(
            module.parameters(), fast.hosts[1].parts[name].parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_a_batch_that_is_cut_the_same_way_is_no_change() -> None:
    before = config.load(["microbatches=4"])
    assert config.differences(before, config.load(["microbatches=2", "replicas=2"])) == []
    assert config.differences(before, config.load(["microbatches=2", "replicas=1"]))
    fast = config.load(["replicas=4", "reduce=fast", "engine=ray"])
    assert config.differences(before, fast)


def test_the_probe_measures_on_the_first_copy() -> None:
    words = [*MLP, "model.blocks=4", "sigma=0.05"]
    settings = config.load([*words, "microbatches=2"])
    oracle = engine_of(settings, data.load(settings), 20)
    crew = in_process(*words, "replicas=2")
    for some in (oracle, crew):
        some.step(0, report=True)
    assert crew.probe(2, 2) == oracle.probe(2, 2)
