"""bench replicas: ways to train take what is known of them, if only sleeping takes time."""

from __future__ import annotations

from collections import Counter

import pytest

from treeprop_ray.benchmarks import crowd
from treeprop_ray.benchmarks.crowd import SAMPLES, T
from treeprop_ray.benchmarks.replicas import CASES, actors_of
from treeprop_ray.core.tree import Tree

ALL = [(N, devices) for N, counts in CASES.items() for devices in counts]


@pytest.mark.parametrize("N, copies", [(N, R) for N in (8, 32) for R in (1, 3, 16)])
def test_copies_do_not_wait_for_each_other(N: int, copies: int) -> None:
    devices = copies * N // 2
    for actors in (copies, 2 * copies, devices):
        way = crowd.trees(N, devices, actors)
        assert (way.copies, way.hosts) == (copies, actors // copies)
        assert way.seconds() == pytest.approx(2 * Tree(N).depth * T)


def test_nodes_that_share_a_device_work_one_after_the_other() -> None:
    levels = 4 + 2  # 16 nodes of the finest level on 8 devices
    for actors in (4, 8):
        assert crowd.trees(32, 8, actors).seconds() == pytest.approx(2 * levels * T)


@pytest.mark.parametrize("N, devices", ALL)
def test_pipelines_have_no_other_waits_than_1f1b(N: int, devices: int) -> None:
    stages, lines = min(N, devices), max(1, devices // N)
    for pieces in (1, 4, 16):
        way = crowd.pipelines(N, devices, actors_of(N, devices), lines * SAMPLES, pieces)
        tick = T * N / stages / pieces
        assert way.seconds() == pytest.approx(2 * (stages + pieces - 1) * tick)
        done = Counter((c.host // way.hosts, op.verb) for c in way.calls for op in c.ops)
        assert set(done.values()) == {stages * pieces} and len(done) == 2 * lines


def test_a_stage_holds_no_more_pieces_than_1f1b() -> None:
    stages = 4
    held, most = Counter[int](), Counter[int]()
    for call in crowd.pipelines(8, stages, stages, SAMPLES, 16).calls:
        for op in call.ops:
            held[op.n] += 1 if op.verb == "ahead" else -1
            most[op.n] = max(most[op.n], held[op.n])
    assert dict(most) == {k: stages - k for k in range(stages)}


@pytest.mark.parametrize("N, devices", ALL)
def test_data_parallelism_keeps_all_devices_busy(N: int, devices: int) -> None:
    way = crowd.data_parallel(N, devices, actors_of(N, devices), 32)
    assert way.seconds() == pytest.approx(2 * N * T * 32 / SAMPLES / devices)


@pytest.mark.parametrize("N, devices", ALL)
def test_all_ways_fit_on_the_actors_of_a_case(N: int, devices: int) -> None:
    actors, samples = actors_of(N, devices), SAMPLES * max(1, 2 * devices // N)
    pipelines = crowd.some_pipelines(N, devices, actors, samples)
    ways = [crowd.trees(N, devices, actors), *pipelines]
    assert all(way.hosts * way.copies == actors for way in ways) and len(ways) == 3
    assert len({way.pieces for way in pipelines}) == 2
