"""replicas=R: copies of all actors share the batch, and give the weights of R times as many
micro-batches in one process, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import engine_of
from hypothesis import example, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from in_process import InProcess, Streaming
from warm import warm_ray

from treeprop_ray import config, data, engine, methods
from treeprop_ray.benchmarks import losses
from treeprop_ray.engine import stream
from treeprop_ray.engine.base import Engine
from treeprop_ray.errors import UserError

STEPS = 2  # the second begins where the first has left the optimizer
Outcome = tuple[list[Any], Any]

GPT = ["experiment=text_small", "model.output_block=true", "model.hidden=8", "model.heads=2",
       "data.length=6", "data.limit=30", "batch=7", "model.dropout=0.2", "split=right_full",
       "model.init_std=0.2"]  # fmt: skip
MLP = ["model.hidden=8", "batch=13", "data.limit=60", "model.activation=tanh"]
TIME = ["experiment=digits_gru", "model.hidden=5", "time.depth=3", "batch=9", "data.limit=60"]


def outcome(crew: Engine) -> Outcome:
    """Losses and norms of every step, and the state after the last."""
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
    return reports, crew.state()


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
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
    expected = outcome(engine_of(settings, samples, STEPS))
    copies = [f"replicas={replicas}", f"microbatches={pieces}", "engine=ray", *more]
    chosen = methods.checked(config.load([*words, *copies]))
    crew = make(methods.job_of(chosen, samples, STEPS))
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
        f"finish={draw(st.sampled_from([0.0, 0.5]))}",
    ]  # fmt: skip
    hosts = draw(st.integers(0, min(3, N - 1)))  # 0: an actor per node
    packed = bp or hosts
    place = ["placement=packed", f"hosts={max(1, hosts)}"] if packed else ["placement=per_node"]
    shard = [f"shard_optimizer={draw(st.sampled_from(['true', 'false']))}"] if R > 1 else []
    transport = [f"transport={draw(st.sampled_from(['store', 'stream']))}"]
    return words, R, pieces, [*place, *shard, *transport]


@given(cases())
@example(
    (
        [*GPT, "model.blocks=8", "clip=0.05", "beta=0.4", "objective=node_all_ce"],
        3,
        2,
        ["placement=packed", "hosts=2", "shard_optimizer=true", "transport=stream"],
    )
)
@example(
    (
        [*MLP, "model.blocks=4", "clip=0.05", "objective=final_ce"],
        1,
        1,
        ["placement=per_node", "transport=store"],
    )
)  # blocks without a gradient: nothing to clip
@example(
    ([*GPT, "model.blocks=8", "finish=0.5"], 7, 1, ["placement=per_node", "transport=store"])
)  # tied weights in many short runs
@limits(max_examples=8, deadline=None)
def test_copies_equal_micro_batches(case: tuple[list[str], int, int, list[str]]) -> None:
    words, replicas, pieces, more = case
    make = Streaming if "transport=stream" in more else InProcess
    compare(words, replicas, pieces, *more, make=make)


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


@pytest.mark.parametrize("shard", ["true", "false"])
def test_who_is_too_large_to_relay_tells_each_copy(
    monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    monkeypatch.setattr(stream, "LITTLE", 0)
    more = ["placement=packed", "hosts=2", "transport=stream", f"shard_optimizer={shard}"]
    compare([*GPT, "model.blocks=4", "clip=0.05"], 3, 1, *more, make=Streaming)


@pytest.mark.parametrize("words", [["time.sweeps=2"], ["time.recipe=lookahead", "time.sweeps=0"]])
@pytest.mark.parametrize("shard", ["true", "false"])
def test_through_time(words: list[str], shard: str) -> None:
    compare([*TIME, *words], 3, 2, f"shard_optimizer={shard}", make=InProcess)


# -- on Ray ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


STREAM = [*GPT, "model.blocks=4", "clip=0.05", "finish=0.5"]


def test_copies_of_actors(local_ray: None) -> None:
    more = ["placement=packed", "hosts=2", "transport=stream", "shard_optimizer=true"]
    compare(STREAM, 2, 1, *more, make=engine.RayEngine)


def test_copies_of_actors_all_reduce(local_ray: None) -> None:
    words = [*MLP, "model.blocks=4", "optimizer=sgd", "lr=1"]
    settings = config.load([*words, "microbatches=2"])
    samples = data.load(settings)
    oracle = engine_of(settings, samples, STEPS)
    more = ["replicas=2", "reduce=fast", "engine=ray", "placement=packed", "hosts=2"]
    crew = engine_of(config.load([*words, *more, "transport=stream"]), samples, STEPS)
    try:
        (reports, found), (others, expected) = outcome(crew), outcome(oracle)
    finally:
        crew.close()
    assert [losses.keys() for losses, _ in reports] == [losses.keys() for losses, _ in others]
    for key, value in expected[0].items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("transport", "shard"),
    [
        ("stream", "false"),
        ("store", "true"),
        pytest.param("store", "false", marks=pytest.mark.long),
        pytest.param("stream", "true", marks=pytest.mark.long),
    ],
)
def test_losses_repeat_few_steps_and_change_no_bit(
    local_ray: None, cold_actors: None, transport: str, shard: str
) -> None:
    """`bench losses` in short: in a recovery, where both copies go, and in a checkpoint."""
    more = ["replicas=2", "hosts=1", f"transport={transport}", f"shard_optimizer={shard}"]
    words = [*losses.WORDS, *losses.COPIES, *more]
    crew = losses.on_actors(words, losses.STEPS)
    run = losses.Disturbed(crew, random.Random(1))
    try:
        losses.lost_in_recovery(run, 2, losses.actors)
        losses.lost_in_checkpoint(run, 1, losses.actors)
    finally:
        crew.close()
    assert crew.recovery.failures >= 2 and run.equal
    assert max(crew.recovery.replays) <= crew.job.settings.in_flight + 1


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


@pytest.mark.parametrize("shard", ["true", "false"])
def test_an_all_reduce_is_close_to_the_ordered_sums(shard: str) -> None:
    """reduce=fast: to 1e-5 the exact gradients, not bit for bit; the copies agree."""
    words = [*MLP, "model.blocks=4", "replicas=3", "microbatches=2", "optimizer=sgd", "lr=1",
             "hosts=2", f"shard_optimizer={shard}", "engine=ray", "placement=packed"]  # fmt: skip
    exact, fast = config.load(words), config.load([*words, "reduce=fast"])
    samples = data.load(exact)
    crews = [Streaming(methods.job_of(methods.checked(s), samples, 20)) for s in (exact, fast)]
    for crew in crews:
        for step in range(STEPS):
            crew.step(step, report=True)
        crew.close()
    expected, found = (crew.state()[0] for crew in crews)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(found[key], value) for key, value in expected.items())
    copies = [crews[1].hosts[k].parts for k in (0, 2, 4)]  # of the first host
    for name, module in copies[0].items():
        for other in copies[1:]:
            pairs = zip(module.parameters(), other[name].parameters(), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


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


def test_batches_that_are_scored_go_round_the_copies() -> None:
    """The same score as in one process, and every copy has its turn."""
    words = [*GPT, "model.blocks=2"]
    oracle = engine_of(config.load(words), data.load(config.load(words)), 20)
    crew = in_process(*words, "replicas=3")
    assert crew.job.splits["validation"] >= 3
    ask, asked = crew.ask, []

    def noted(host: int, *words: Any, **more: Any) -> Any:
        asked.append(host)
        return ask(host, *words, **more)

    crew.ask = noted  # type: ignore[method-assign]
    paths = {"full": crew.tree.chain}
    assert crew.score(paths, "validation") == oracle.score(paths, "validation")
    assert set(asked) == {0, 1, 2}
