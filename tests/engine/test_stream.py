"""transport=stream: the local engine's numbers bit for bit, also after losses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import ray
import torch
from conftest import engine_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import TCPStore
from warm import warm_ray

from treeprop_ray import config, data
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine import LocalEngine
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.direct import Direct, partners
from treeprop_ray.engine.links import Address, WireBroken, timeval
from treeprop_ray.engine.stream import STEP, StreamActor
from treeprop_ray.engine.wire import KINDS, SMALL, Wire
from treeprop_ray.errors import TrainingError
from treeprop_ray.hosts.base import Host
from treeprop_ray.methods import job_of
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.placement import lines
from treeprop_ray.schedule.placement import pack as packed
from treeprop_ray.schedule.programs import programs
from treeprop_ray.schedule.tree import one_step

BASE = ["model.blocks=5", "model.hidden=8", "batch=32", "model.activation=tanh", "sigma=0.05",
        "alpha=1", "transport=stream"]  # fmt: skip


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


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


@contextlib.contextmanager
def joined(shares: bool, patience: float = 60.0) -> Iterator[tuple[Wire, Wire]]:
    """Two ends in this process, over shared memory or as between machines."""
    ends = [Wire("127.0.0.1", bytes(32), patience, shares) for _ in range(2)]
    addresses = [end.address for end in ends]
    with ThreadPoolExecutor() as pool:  # each waits for the other
        list(pool.map(lambda rank: ends[rank].join(rank, addresses, [1 - rank]), range(2)))
    yield ends[0], ends[1]
    for end in ends:
        end.close()


@pytest.fixture(params=[True, False], ids=["shared", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Wire, Wire]]:
    with joined(request.param) as ends:
        yield ends


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "tcp"])
def test_who_waits_in_vain_leaves(shares: bool) -> None:
    with joined(shares, 2.5) as (one, two):
        one.send(1, [torch.ones(3)])
        two.take(0)
        for link in (*one.links.values(), *two.links.values()):
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0.01))
        with pytest.raises(WireBroken, match=r"connection to peer 0: no packet within 2\.5 s"):
            two.take(0)
    assert timeval(0) == timeval(1e-9) != timeval(1e30)  # never 0, which is for ever


@pytest.mark.parametrize("size", [0, 3, SMALL, 10 * SMALL])
def test_packets_arrive_with_their_bits(pair: tuple[Wire, Wire], size: int) -> None:
    sent = [torch.arange(size).to(kind) for kind in KINDS] + [
        None,
        torch.ones(2, 3),
        torch.ones(()),
    ]
    sent += [torch.arange(12.0).view(3, 4).T, torch.empty(0, 5)]
    for _ in range(3):  # of which the first makes the segment
        pair[0].send(1, sent)
        for a, b in zip(pair[1].take(0), sent, strict=True):
            assert (a is None and b is None) or (
                a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)
            )
            assert a is None or a.data_ptr() % 64 == 0


def test_what_was_taken_stays_as_it_is_while_it_is_needed(pair: tuple[Wire, Wire]) -> None:
    """Senders run ahead, and both send more than the system takes before anybody reads."""
    for step in range(4):
        for rank in range(2):
            pair[rank].send(1 - rank, [torch.full((1 << 20,), float(step))])
    first, *rest = [pair[1].take(0)[0] for _ in range(4)]
    rest.clear()
    pair[0].send(1, [torch.full((1 << 20,), 7.0)])
    assert torch.equal(first, torch.zeros(1 << 20))
    assert torch.equal(pair[1].take(0)[0], torch.full((1 << 20,), 7.0))
    assert [float(pair[0].take(1)[0][0]) for _ in range(4)] == [0, 1, 2, 3]
    if pair[0].links[1].near:
        assert len(pair[0].pools[1].segments) == 4  # one of those that were given back served again


def test_who_waits_hears_at_once_that_the_other_has_gone(pair: tuple[Wire, Wire]) -> None:
    pair[0].close()
    with pytest.raises(WireBroken, match="connection to peer 0"):
        pair[1].take(0)
    with pytest.raises(WireBroken, match="connection to peer 0"):
        for _ in range(100):
            pair[1].send(0, [torch.ones(1000)])


def test_tensors_of_a_device_go_beside_the_links(pair: tuple[Wire, Wire]) -> None:
    """The way of nccl, with gloo in its place and the CPU as the device."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting, cpu = ("127.0.0.1", store.port), torch.device("cpu")

    def end_of(rank: int) -> Direct:
        direct = Direct("gloo", rank, 2, meeting, "test", 60.0, cpu)
        direct.greet([1 - rank])
        return direct

    with ThreadPoolExecutor() as pool:
        pair[0].direct, pair[1].direct = pool.map(end_of, range(2))
    sent = [torch.randn(3, 4).T, None, torch.arange(5), torch.empty(0, 2), torch.ones(())]
    for rank in (0, 1, 0):  # both ways, and more than one packet under way
        pair[rank].send(1 - rank, sent)
    pair[0].send(1, [None])  # nothing to send beside
    for rank in (1, 0, 1):
        for a, b in zip(pair[rank].take(1 - rank), sent, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert pair[1].take(0) == [None]


def test_processes_that_share_a_gpu_or_have_none_are_no_partners() -> None:
    addresses = [Address("", "", "", 0, gpu) for gpu in ("a", "b", "", "a")]
    assert partners(0, addresses, [1, 2, 3]) == [1]
    assert partners(1, addresses, [0, 2, 3]) == [0, 3]
    assert partners(2, addresses, [0, 1, 3]) == []


def test_strangers_are_not_let_in() -> None:
    one = Wire("127.0.0.1", bytes(32), 60.0)
    other = Wire("127.0.0.1", bytes([1] * 32), 60.0)
    stranger = other.door.knock(1, one.address, 60.0)
    with pytest.raises(WireBroken, match="1 peers did not come"):
        one.door.admit(1, 0.1)
    with pytest.raises(WireBroken):
        stranger.read(1)


@pytest.mark.parametrize("figures", [{"1-2": float("inf")}, {}], ids=["some", "none"])
def test_figures_are_exchanged_exactly(pair: tuple[Wire, Wire], figures: dict[str, float]) -> None:
    told = [{"0-1": 0.1 + 0.2, "stem": 1e-300}, figures]
    with ThreadPoolExecutor() as pool:
        heard = list(pool.map(lambda k: pair[k].exchange(told[k], [1 - k]), range(2)))
    assert heard == [[told[1]], [told[0]]]


@pytest.mark.parametrize(
    "words",
    [
        ["placement=per_node", "objective=node_all_ce", "head_copies=2", "microbatches=3"],
        ["placement=packed", "hosts=3", "beta=0.5", "clip=0.05", "head_copies=1"],
        ["method=bp", "placement=packed", "hosts=4", "microbatches=2", "clip=0.1"],
    ],
    ids=["nodes", "packed", "bp"],
)
def test_actors_in_threads_are_bitwise_the_local_engine(words: Sequence[str]) -> None:
    """Programs, wire and hosts without Ray; what threads of one process share is only the seed."""
    settings = config.load([*BASE, *words, "engine=ray"])
    samples = data.load(settings)
    alone = replace(settings, engine="local", head_copies=0)
    oracle = LocalEngine(job_of(alone, samples, 20))
    job = job_of(settings, samples, 20)
    plan = job.method.plan(settings, job.tree, Cluster(((64.0, 0.0),)))
    mine = programs(job.method.calls(job, plan), len(plan.names))
    actors = []
    for index, name in enumerate(plan.names):
        host = partial(job.method.host, job, plan, index)
        role = Role(name, "", host, (), job.places, settings.pieces, programs={STEP: mine[index]},
                    clip=job.optimizer.exchanges)  # fmt: skip
        actors.append(StreamActor(role))
        actors[-1].wire = Wire("127.0.0.1", bytes(32), 60.0)
    addresses = [actor.wire.address for actor in actors if actor.wire]
    with ThreadPoolExecutor(len(actors)) as pool:
        for work in [
            pool.submit(actor.connect, rank, addresses, None, "")
            for rank, actor in enumerate(actors)
        ]:
            work.result()
        steps = [(step, False, STEP) for step in range(4)]
        for work in [pool.submit(actor.run_steps, steps) for actor in actors]:
            work.result()
    for step, *_ in steps:
        oracle.step(step, report=False)
    states = [actor.host.state() for actor in actors if isinstance(actor.host, Host)]
    found = [{k: v for state in states for k, v in state[kind].items()} for kind in (0, 1)]
    assert_same(found, oracle.state())
    for actor in actors:
        actor.disconnect()


def assert_same(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())


CASES: list[Sequence[str]] = [
    ["placement=packed", "hosts=2"],
    ["placement=packed", "hosts=3", "beta=0.5", "clip=0.05", "microbatches=3", "head_copies=1"],
    ["placement=per_node", "objective=node_all_ce", "finish=0.6"],
    ["method=bp", "placement=packed", "hosts=3", "microbatches=2", "clip=0.1"],
    ["method=cff", "placement=packed", "hosts=2", "sigma=0"],
    ["experiment=digits_gru", "model.name=gru", "sigma=0", "time.depth=3", "time.sweeps=2"],
]  # fmt: skip


@pytest.mark.parametrize("words", CASES, ids=["packed", "clip", "node", "bp", "cff", "gru"])
def test_actors_that_stream_are_bitwise_the_local_engine(
    local_ray: None, words: Sequence[str]
) -> None:
    where = ("placement", "hosts", "head_copies")
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


@pytest.mark.parametrize("short", [1e9, 0.0], ids=["stream", "store"])
def test_auto_chooses_by_the_time_of_calls(
    local_ray: None, monkeypatch: pytest.MonkeyPatch, short: float
) -> None:
    monkeypatch.setattr("treeprop_ray.engine.stream.SHORT", short)
    words = [*BASE, "transport=auto", "clip=0.05"]
    samples = data.load(config.load(words))
    oracle = engine_of(config.load(words), samples, 40)
    engine = engine_of(
        config.load([*words, "engine=ray", "placement=packed", "hosts=2"]), samples, 40
    )
    try:
        for step in range(9):
            for one in (oracle, engine):
                one.step(step, report=step == 8)
        assert engine.driver.streams is (short > 0)
        assert (engine.driver.calls_per_step == 1) is (short > 0)
        assert engine.probe(1, 1) == pytest.approx(oracle.probe(1, 1), rel=1e-9)
        assert_same(engine.state(), oracle.state())
    finally:
        engine.close()


def pids() -> dict[str, int]:
    return {
        a["Name"].rpartition("/")[2]: a["Pid"]
        for a in ray._private.state.actors().values()
        if a["State"] == "ALIVE" and a["Pid"]
    }


def test_killed_actors_leave_the_weights_as_they_were(local_ray: None, cold_actors: None) -> None:
    words = [*BASE, "beta=0.5", "clip=0.05", "microbatches=2", "finish=0.5"]  # from step 20 on
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
