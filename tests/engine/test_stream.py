"""transport=stream: the local engine's numbers bit for bit, also after losses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
import torch
from conftest import engine_of
from hypothesis import given, settings
from hypothesis import strategies as st

from treeprop_ray import config, data
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine import runtime
from treeprop_ray.engine.stream import programs
from treeprop_ray.engine.wire import KINDS, SMALL, pack, unpack
from treeprop_ray.errors import TrainingError
from treeprop_ray.schedule.placement import lines
from treeprop_ray.schedule.placement import pack as packed
from treeprop_ray.schedule.tree import one_step

BASE = ["model.blocks=5", "model.hidden=8", "batch=32", "model.activation=tanh", "sigma=0.05",
        "alpha=1", "transport=stream"]  # fmt: skip


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    runtime.start(config.RaySettings(num_cpus=2))
    yield
    runtime.stop()


@given(st.integers(2, 40), st.integers(1, 6), st.integers(1, 3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_packet_that_is_given_is_taken_once_and_nobody_waits_for_ever(
    N: int, hosts: int, pieces: int, beta: bool
) -> None:
    """The programs of all hosts, run side by side, come to their end with nothing left over."""
    tree = Tree(N)
    hosts = min(hosts, len(lines(tree)))
    rule = Rule(objective="node_all_ce", beta=0.5 if beta else 0.0)
    calls = one_step(tree, rule, packed(tree, hosts), True, pieces)
    all_programs = programs(calls, hosts)
    wires: dict[tuple[int, int], list[Any]] = {}
    at, moved = [0] * hosts, True
    while moved:
        moved = False
        for host, program in enumerate(all_programs):
            while at[host] < len(program.turns):
                turn = program.turns[at[host]]
                if any(key not in wires.get((source, host), []) for source, key in turn.takes):
                    break
                for source, key in turn.takes:
                    wires[source, host].remove(key)
                for target, key in turn.gives:
                    wires.setdefault((host, target), []).append(key)
                at[host], moved = at[host] + 1, True
    assert at == [len(program.turns) for program in all_programs]
    assert not any(wires.values())
    assert sum(len(p.turns) for p in all_programs) == len(calls)


@pytest.mark.parametrize("size", [0, 3, SMALL, 10 * SMALL])
def test_packets_arrive_with_their_bits(size: int) -> None:
    sent = [torch.arange(size).to(kind) for kind in KINDS[:6]] + [None, torch.ones(2, 3)]
    head, body = pack(sent)

    def receive(into: torch.Tensor) -> None:
        assert body is not None
        into.copy_(body)

    for a, b in zip(unpack(head, receive), sent, strict=True):
        assert (a is None and b is None) or (
            a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)
        )


def assert_same(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())


CASES: list[Sequence[str]] = [
    ["placement=packed", "hosts=2"],
    ["placement=packed", "hosts=3", "beta=0.5", "clip=0.05", "microbatches=3"],
    ["placement=per_node", "objective=node_all_ce"],
    ["method=bp", "placement=packed", "hosts=3", "microbatches=2", "clip=0.1"],
    ["method=cff", "placement=packed", "hosts=2", "sigma=0"],
    ["experiment=digits_gru", "model.name=gru", "sigma=0", "time.depth=3", "time.sweeps=2"],
]  # fmt: skip


@pytest.mark.parametrize("words", CASES, ids=["packed", "clip", "node", "bp", "cff", "gru"])
def test_actors_that_stream_are_bitwise_the_local_engine(
    local_ray: None, words: Sequence[str]
) -> None:
    where = ("placement", "hosts")
    base = [*BASE, *(w for w in words if not w.startswith(where))]
    samples = data.load(config.load(base))
    oracle = engine_of(config.load(base), samples, 40)
    engine = engine_of(config.load([*BASE, *words, "engine=ray"]), samples, 40)
    try:
        for step in range(21):  # more than two calls of the driver
            for one in (oracle, engine):
                one.step(step, report=step == 9)
            if step == 9:
                norms = [r.square_norms for r in engine.reports()]
                theirs = oracle.reports()[0].square_norms
                assert {k: v for part in norms for k, v in part.items()} == theirs
        assert_same(engine.state(), oracle.state())
        paths = {"full": engine.tree.chain}
        assert engine.score(paths, "test") == oracle.score(paths, "test")
        if oracle.method.probed:
            assert engine.probe(2, 2) == pytest.approx(oracle.probe(2, 2), rel=1e-9)
        for one in (oracle, engine):
            one.step(21, report=True)
        assert_same(engine.state(), oracle.state())
        assert len(engine.spans()) > 0
    finally:
        engine.close()


def pids() -> dict[str, int]:
    return {
        a["Name"].rpartition("/")[2]: a["Pid"]
        for a in ray._private.state.actors().values()
        if a["State"] == "ALIVE" and a["Pid"]
    }


def test_killed_actors_leave_the_weights_as_they_were(local_ray: None) -> None:
    words = [*BASE, "beta=0.5", "clip=0.05", "microbatches=2"]
    samples = data.load(config.load(words))
    oracle = engine_of(config.load(words), samples, 60)
    more = ["engine=ray", "placement=packed", "hosts=3", "snapshot_every=4", "max_failures=20"]
    engine = engine_of(config.load([*words, *more]), samples, 60)
    try:
        for step in range(40):
            oracle.step(step, report=False)
            engine.step(step, report=False)
            if step == 15:
                engine.recovery.guarded(lambda: engine.recovery.mark(16))
            if step in (9, 22):
                os.kill(pids()[f"host-{step % 3}"], signal.SIGKILL)
        assert_same(engine.state(), oracle.state())
        assert engine.recovery.failures >= 2 and engine.recovery.point[0] >= 16
    finally:
        engine.close()


def test_a_failure_is_told_as_what_it_is_and_not_as_a_loss(local_ray: None) -> None:
    words = [*BASE, "engine=ray", "placement=packed", "hosts=3", "lr=1e15", "optimizer=sgd"]
    samples = data.load(config.load(words))
    engine = engine_of(config.load(words), samples, 60)
    try:
        with pytest.raises(TrainingError, match=r"(loss \w+|gradient of block \S+)(=| is )\S+ at"):
            for step in range(30):
                engine.step(step, report=step % 8 == 7)
            engine.reports()
        assert engine.recovery.failures == 0
    finally:
        engine.close()
