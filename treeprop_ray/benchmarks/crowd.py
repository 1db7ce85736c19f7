"""Emulated devices of several copies, which play one way to train after the other.

A way is the calls of one step and what each costs; an actor stands for several devices that sleep
at the same time. A block takes `T` seconds for `SAMPLES` samples, forward or backward, and less for
fewer.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from treeprop_ray.benchmarks.emulated import EmulatedHost
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.stream import AutoDriver
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.copies import copied
from treeprop_ray.schedule.ops import Call, Layout, Op, Row, alike, interleave, make_calls
from treeprop_ray.schedule.placement import Plan, pack
from treeprop_ray.schedule.pricing import FREE, RUNTIMES, SHARED, Runtime, exchanged, price
from treeprop_ray.schedule.tree import one_step

T, SAMPLES = 0.02, 16  # seconds of a block, on so many samples
WARM = 2  # steps before a timing


@dataclass(frozen=True)
class Way:
    """A way to train: the calls of a step of all copies of some hosts."""

    shape: str  # copies x devices of a copy
    calls: list[Call]
    hosts: int  # of a copy
    copies: int
    cost: Callable[[Call], float]
    pieces: int = 1  # micro-batches of a copy

    def seconds(self, ray: Runtime = FREE) -> float:
        """A step by the cost model; with FREE the ideal, nothing but sleeping."""
        actors = self.hosts * self.copies
        step = price(self.calls, actors, self.cost, lambda _: 0.0, SHARED, ray)
        step = exchanged(step, self.copies, self.hosts, [0.0], SHARED, ray)
        return max(step.path, step.driver / self.copies)  # `calls` are those of all copies already


def trees(N: int, devices: int, actors: int) -> Way:
    """Copies of a tree on N / 2 devices each, or one on fewer."""
    copies = max(1, 2 * devices // N)
    each, hosts, tree = devices // copies, actors // copies, Tree(N)
    device_of = pack(tree, each).host_of
    host_of = {n: device * hosts // each for n, device in device_of.items()}
    layout = Layout(host_of, one_machine=True)
    # not gathered: a host stands for many devices, which wait for each other's levels
    rule = Rule(objective="node_all_ce")
    calls = one_step(tree, rule, layout, True, copies, gathered=False)
    cost = partial(as_devices, T, device_of)
    return Way(f"{copies} x {each}", copied(calls, hosts, copies, copies), hosts, copies, cost)


def as_devices(t: float, device_of: Mapping[int, int], call: Call) -> float:
    """As the paper counts: a unit for a node's forward, one for its backward. Devices of a call
    work at the same time, each on one node after the other."""
    busy = Counter((op.verb, device_of[op.n]) for op in call.ops if op.verb in ("lift", "backward"))
    most = {verb: max(n for (v, _), n in busy.items() if v == verb) for verb, _ in busy}
    return t * sum(most.values())


def pipelines(N: int, devices: int, actors: int, samples: int, pieces: int) -> Way:
    """Chains of at most N stages side by side, 1F1B: forward and backward by turns.

    Forward and backward of a piece are a tick each, so a piece enters every second one and none
    waits; stage k holds at most as many as there are stages from it on. Three stages:

        stage 0   F0    F1    F2 B0 F3 B1    B2    B3
        stage 1      F0    F1 B0 F2 B1 F3 B2    B3
        stage 2         F0 B0 F1 B1 F2 B2 F3 B3
    """
    stages = min(devices, N)
    lines = devices // stages
    hosts = min(stages, actors // lines)
    rows: list[Row] = []
    for tick in range(2 * (stages + pieces - 1)):
        by_host: dict[int, list[Op]] = {}
        for k in range(stages):
            ahead = (tick - k) % 2 == 0
            m = (tick - (k if ahead else 2 * stages - 1 - k)) // 2
            if 0 <= m < pieces:
                by_host.setdefault(k * hosts // stages, []).append(stage(k, stages, m, ahead))
        rows.append((tick, "forward" if tick < stages else "backward", tick, by_host))
    calls = interleave(alike(make_calls(rows, 0, one_machine=True), lines), stride=0)
    cost = partial(always, T * N / stages * samples / (lines * pieces * SAMPLES))
    calls = copied(calls, hosts, lines, lines)
    return Way(f"{lines} x {stages}", calls, hosts, lines, cost, pieces)


def stage(k: int, stages: int, m: int, ahead: bool) -> Op:
    """Stage k goes forward or backward with piece m."""
    if ahead:
        return Op("ahead", k, (f"z{k}-{m}",) if k else (), (f"z{k + 1}-{m}",))
    above = "z" if k + 1 == stages else "a"
    return Op("back", k, (f"{above}{k + 1}-{m}",), (f"a{k}-{m}",))


def some_pipelines(N: int, devices: int, actors: int, samples: int) -> list[Way]:
    """With the number of micro-batches that is fastest where every hop takes its time, and with a
    quarter of them, which hop less."""
    most = samples // (devices // min(devices, N))
    counts = [m for m in (4, 8, 16, 32, 64) if m <= most]
    ways = {m: pipelines(N, devices, actors, samples, m) for m in counts}
    best = min(ways, key=lambda m: ways[m].seconds(RUNTIMES["stream"]))
    return [ways[m] for m in (best, best // 4) if m in ways]


def data_parallel(N: int, devices: int, actors: int, samples: int) -> Way:
    """The whole chain on every device, which has its share of the samples; devices of one actor
    have added up their gradients already."""
    calls = copied(one_chain_step(1, True, actors), 1, actors, actors)
    cost = partial(always, 2 * N * T * samples / (devices * SAMPLES))
    return Way(f"{devices} x 1", calls, 1, actors, cost)


def always(seconds: float, call: Call) -> float:
    """Every call takes the same time."""
    return seconds


class Crowd:
    """Emulated actors that take up one way after the other, by either transport, and with or
    without adding up what has no bytes."""

    def __init__(self, actors: int) -> None:
        self.actors, self.clock = actors, itertools.count()
        names = tuple(f"replicas/actor-{k}" for k in range(actors))
        self.plan = Plan(Layout({}), names, 0.01, 0.0)
        idle = Way("", [], actors, 1, partial(always, 0.0))
        self.driver = AutoDriver(self.plan, self._roles(idle, 1), [], clip=False, in_flight=2)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()

    def play(self, way: Way, transport: str, sums: bool = True) -> None:
        """Take up a way, and go a few steps. Copies that do not add up are as many hosts of one."""
        driver, copies = self.driver, way.copies if sums else 1
        driver.wait()
        driver.streams = transport == "stream"
        driver.plan = replace(
            self.plan, names=self.plan.names[: self.actors // copies], copies=copies
        )
        driver.become(self._roles(way, copies), way.calls)
        self.seconds(WARM)

    def _roles(self, way: Way, copies: int) -> list[Role]:
        return [
            Role(
                name=name,
                about="emulated",
                make_host=partial(EmulatedHost, way.cost, copies=way.copies),
                calls=tuple(c for c in way.calls if c.host == k),
                total=way.copies,
                pieces=way.copies,
                copy=k * copies // self.actors,
                copies=copies,
            )
            for k, name in enumerate(self.plan.names)
        ]

    def seconds(self, steps: int) -> float:
        """Seconds of a step of all copies; steps are submitted ahead."""
        began = time.perf_counter()
        for step in itertools.islice(self.clock, steps):
            self.driver.step(step, False)
        self.driver.wait()
        return (time.perf_counter() - began) / steps
