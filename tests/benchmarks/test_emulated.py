"""Emulated devices: hosts sleep what their calls cost, and a step is as long as it should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch

from treeprop_ray import bench
from treeprop_ray.benchmarks import pipeline_span
from treeprop_ray.benchmarks.alarm import Alarm
from treeprop_ray.benchmarks.emulated import HOSTS, EmulatedHost, Emulation, Price, local_ray
from treeprop_ray.benchmarks.peer import Sleeper
from treeprop_ray.benchmarks.span import (
    TIMES,
    Strict,
    as_the_paper,
    chain_calls,
    times_of,
    tree_calls,
)
from treeprop_ray.benchmarks.span_cff import layer_by_layer, layer_calls
from treeprop_ray.benchmarks.span_wire import AIMED, Hops, aim, allowed, far_chain, row_of
from treeprop_ray.benchmarks.tt_span import UNIT, by_depth, by_symbol, span_of, time_calls
from treeprop_ray.core.rule import Rule, cut
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import pack
from treeprop_ray.schedule.tree import one_step

PIECE = cut(0, 1, 1)[0]


def step_of(calls: Sequence[Call], price_at: Callable[[Callable[[], float]], Price]) -> float:
    """When the last host wakes up, if only sleeping takes time; a host's clock is its own time."""
    awake, there = [0.0] * HOSTS, dict[str, float]()

    def host_of(host: int) -> EmulatedHost:
        def sleep(seconds: float) -> None:
            awake[host] += seconds

        return EmulatedHost(price_at(lambda: awake[host]), sleep)

    hosts = [host_of(host) for host in range(HOSTS)]
    for call in calls:
        awake[call.host] = max([awake[call.host], *(there[name] for name in call.inputs)])
        sent = hosts[call.host].run(call, PIECE, {})
        assert list(sent) == call.outputs
        there.update(dict.fromkeys(sent, awake[call.host]))
    return max(awake)


@pytest.mark.parametrize("N", [8, 16, 64])
def test_waves_chains_and_layers_have_their_ideal_length(N: int) -> None:
    depth = Tree(N).depth
    assert step_of(tree_calls(N), lambda _: partial(as_the_paper, 1.0, 0)) == 2 * depth
    assert step_of(tree_calls(N), lambda clock: Strict(1.0, clock)) == 2 * (depth + 1)
    for stages in (HOSTS, N):
        price = partial(as_the_paper, 1.0, N // stages)
        assert step_of(chain_calls(stages), lambda _, price=price: price) == 2 * N
    assert step_of(layer_calls(N), lambda _: partial(layer_by_layer, 1.0)) == N + 1


def test_an_alarm_is_never_early_and_learns_how_late_it_is() -> None:
    now, late = 0.0, 0.3

    def clock() -> float:
        nonlocal now
        now += 1e-3  # waiting takes time too
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + late

    alarm, took = Alarm(clock, sleep), []
    for _ in range(60):
        began = now
        alarm(5.0)
        took.append(now - began)
    assert min(took) >= 5.0
    assert took[0] > 5.29
    assert max(took[40:]) < 5.01


def test_a_block_of_the_peers_sleeps_forward_and_for_each_gradient() -> None:
    block, slept = Sleeper(0.5), list[float]()
    block.sleep = slept.append  # type: ignore[assignment]
    block(torch.zeros(2, 1, requires_grad=True)).sum().backward()
    assert slept == [1.0, 2.0]
    block(torch.zeros(2, 1)).sum().backward()  # a first block needs no gradient of its input
    assert slept[2:] == [1.0, 1.0]
    assert block.weight.grad is not None


def test_chains_of_which_neighbours_are_never_in_one_actor() -> None:
    calls = far_chain(8, HOSTS)
    assert step_of(calls, lambda _: partial(as_the_paper, 1.0, 1)) == 16
    assert all(a.host != b.host for a, b in pairwise(calls) if a.phase == b.phase == "forward")


def test_waves_and_chain_of_bench_pipeline_span() -> None:
    """24 units of backpropagation one after the other; the waves have 36, on four devices."""
    tree = Tree(pipeline_span.N)
    waves = one_step(tree, Rule(objective="node"), pack(tree, 4), True)
    for calls, units, work, span in (
        (one_chain_step(4, True), pipeline_span.CHAIN, 24, 24),
        (waves, pipeline_span.TREE, 36, 14),
    ):
        price = partial(pipeline_span.price, units, 1.0)
        assert sum(map(price, calls)) == work
        assert step_of(calls, lambda _, price=price: price) == span


@pytest.mark.parametrize("sweeps", [0, 1, 4])
def test_a_time_tree_is_as_long_as_its_depths(sweeps: int) -> None:
    for D in (2, 4, 6):
        tree = step_of(time_calls(D), lambda _: partial(by_depth, sweeps))
        assert tree == pytest.approx(UNIT * span_of(D, sweeps))
    symbols = step_of(chain_calls(HOSTS), lambda _: partial(by_symbol, 16))
    assert symbols == pytest.approx(UNIT * 2 * 16 * HOSTS)


@pytest.mark.parametrize("transport", ["store", "stream"])
def test_the_same_actors_play_one_schedule_after_the_other(transport: str) -> None:
    with local_ray(), Emulation(transport) as emulation:
        driver = emulation.play(tree_calls(8), partial(as_the_paper, 0.0, 0))
        assert emulation.seconds(steps=2, rounds=3) > 0
        by_driver = len(tree_calls(8)) + HOSTS if transport == "store" else 1
        assert driver.calls_per_step == by_driver
        actors = list(driver.actors)
        assert emulation.play(layer_calls(8), partial(layer_by_layer, 0.0)) is driver
        assert emulation.seconds(steps=6, in_flight=HOSTS) > 0
        assert driver.actors == actors
    assert not driver.actors


def test_the_times_of_a_block_can_be_chosen() -> None:
    assert times_of(bench.load(["span"]), TIMES) == [5, 20, 50]
    assert times_of(bench.load(["span", "t=[2,0.5,2]"]), TIMES) == [2, 0.5]
    with pytest.raises(UserError, match=r"t=0: ms of a block, from 0\.1 to 1000"):
        times_of(bench.load(["span", "t=[0]"]), TIMES)


def test_a_table_of_one_transport_compares_it_with_the_ideal_alone() -> None:
    hops = Hops(gloo=0.0001, wire=0.0001, crowd=0.0005)
    row = row_of({"stream": (0.015, 0.04)}, 8, 2, hops)
    assert row["stream reaches (%)"] == 80 and row["all hop at once reach (%)"] == 83
    assert "store" not in " ".join(row) and aim([row]).startswith("One transport")
    assert "t = 2 ms: 83 to 83 %" in allowed([row], 16)
    both = row_of({"store": (0.02, 0.05), "stream": (0.015, 0.04)}, 8, 2, hops)
    assert "Missed: t = 2, N = 8." in aim([both])
    assert all(f"t = {t}, N = {N}" in aim([both]) for t, N in AIMED)
