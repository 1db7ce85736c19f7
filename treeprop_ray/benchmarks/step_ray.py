"""bench step engine=ray: real compute, two actors against one process, by both transports.

Blocks as large as those of a ViT, and small ones (an MLP), where what is between the blocks counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch

from treeprop_ray import config
from treeprop_ray.benchmarks.random_data import CIFAR, MNIST, random_images, random_job
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.core.rule import cut
from treeprop_ray.engine import Engine, RayEngine, build
from treeprop_ray.engine.base import Span
from treeprop_ray.reporting.tables import write_table

BASE = ["experiment=cifar10_vit", "batch=32", "model.dropout=0", "data.augment=none", "device=cpu"]
STEP = [*BASE, "clip=0"]  # a row of its own has the clipping of the experiment
SMALL = ["experiment=mnist_d3", "model.hidden=500", "batch=64", "clip=0", "device=cpu"]
OVERHEAD = "overhead (ms)"
APART = "2 processes apart, a step each"
ONE = "local, 1 thread"
NAMES = itertools.count()
PACKED = ["engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "cpus_per_actor=0.1"]


def on_images(words: list[str]) -> Engine:
    """The engine of some settings, on random images of the size that the network takes."""
    settings = config.load(words)
    shape = MNIST if settings.model.name == "mlp" else CIFAR
    return build(random_job(settings, random_images(256, shape)))


def on_actors(words: list[str]) -> RayEngine:
    """The same on two packed actors; with a name of its own, as several live side by side."""
    engine = on_images([*PACKED, *words, f"name=bench-{next(NAMES)}"])
    assert isinstance(engine, RayEngine)
    return engine


class Lone:
    """A process that trains alone, with one thread."""

    def __init__(self, words: list[str]) -> None:
        self.engine = on_images(words)
        torch.set_num_threads(1)

    def train(self, steps: int) -> None:
        """So many steps."""
        for step in range(steps):
            self.engine.step(step, report=False)


class Candidates:
    """What is timed: functions that do `steps` steps, and what the actors tell about them."""

    def __init__(self, base: list[str], steps: int) -> None:
        self.base, self.steps, self.clock = base, steps, itertools.count()
        self.work: dict[str, Callable[[], None]] = {}
        self.engines: dict[str, RayEngine] = {}
        self.busiest: dict[str, list[float]] = {}  # seconds of compute per step
        self.idle: dict[str, list[float]] = {}  # the rest of the step
        self.ends: dict[str, list[float]] = {}  # of that: from step to step
        self.lone: list[Any] = []

    def add_local(self, name: str, words: list[str], threads: int) -> None:
        """In this process."""
        steps = steps_of(on_images([*self.base, *words]), self.steps, self.clock)

        def go() -> None:
            torch.set_num_threads(threads)
            steps()

        self.work[name] = go

    def add_ray(self, name: str, words: list[str]) -> None:
        """On two packed hosts."""
        engine = self.engines[name] = on_actors([*self.base, *words])
        steps = steps_of(engine, self.steps, self.clock)
        self.busiest[name], self.idle[name], self.ends[name] = [], [], []

        def go() -> None:
            engine.usage()
            began = time.perf_counter()
            steps()
            wall = time.perf_counter() - began
            busiest, _, spans = max(engine.usage(), key=lambda told: told[0])
            self.busiest[name].append(busiest / self.steps)
            self.ends[name].append(between_steps(spans))
            self.idle[name].append((wall - busiest) / self.steps)

        self.work[name] = go

    def add_lone(self, name: str, count: int = 2) -> None:
        """Processes that have nothing to do with each other: what the cores can do at best."""
        self.lone = [ray.remote(num_cpus=0.1)(Lone).remote(self.base) for _ in range(count)]
        self.work[name] = lambda: ray.get([a.train.remote(self.steps) for a in self.lone])

    def close(self) -> None:
        """End all actors."""
        for actor in self.lone:
            ray.kill(actor)
        for engine in reversed(list(self.engines.values())):
            engine.close()

    def moved(self, engine: RayEngine) -> float:
        """MB that one step sends from actor to actor."""
        engine.usage()
        engine.step(next(self.clock), report=False)
        return sum(sent for _, sent, _ in engine.usage()) / 1e6


def between_steps(spans: Sequence[Span]) -> float:
    """Seconds that an actor is idle from its last call of a step to its first of the next."""
    idle = []
    for a, b in itertools.pairwise(spans):
        if a.step != b.step:
            ends = [s for s in spans if s.step == a.step and s.phase in ("report", "update")]
            last = max(s.end for s in spans if s.step == a.step and s not in ends)
            idle.append(b.begin - last - sum(s.end - s.begin for s in ends))
    return statistics.median(idle)


def hop_of(samples: int, hops: int = 20) -> float:
    """Seconds from the end of a call that makes the state of some samples to the start of another
    actor's call that takes it, with nothing else under way."""

    class Bare:
        def make(self) -> tuple[float, Any]:
            array = np.zeros((samples, 64, 240), dtype=np.float32)
            return time.time(), array

        def take(self, end: float, _: Any) -> float:
            return time.time() - end

    one, two = (ray.remote(num_cpus=0.1)(Bare).remote() for _ in range(2))
    measured = []
    for _ in range(hops):
        ends, state = one.make.options(num_returns=2).remote()
        measured.append(ray.get(two.take.remote(ends, state)))
    for actor in (one, two):
        ray.kill(actor)
    return statistics.median(measured)


STREAM = ["transport=stream"]
CUTS = {  # rows of the table -> settings
    "2 actors": [],
    "2 actors, stream": STREAM,
    "2 actors, clip=1": ["clip=1"],
    "2 actors, clip=1, stream": ["clip=1", *STREAM],
    "2 actors, 2 micro-batches": ["microbatches=2"],
    "2 actors, 2 micro-batches, stream": ["microbatches=2", *STREAM],
}


def run(bench: BenchSettings) -> None:
    """One thread and two threads locally, BP, two packed actors with one thread each."""
    wanted = {name: words for name, words in CUTS.items() if wants(bench, name)}
    run_small(bench, list(wanted)[:2])
    timed = Candidates(STEP, max(2, bench.steps // 4))
    timed.add_local(ONE, [], 1)
    timed.add_local("local, 2 threads", [], 2)
    timed.add_local("BP, 2 threads", ["method=bp"], 2)
    try:
        for name, words in wanted.items():
            timed.add_ray(name, words)
        timed.add_lone(APART)
        seconds = in_turn(timed.work, bench.rounds)
        rows = [row_of(name, timed, seconds) for name in timed.work]
        hops = {samples: 1000 * hop_of(samples) for samples in (2, 32)}
    finally:
        timed.close()
    both = done_by_two(seconds)
    notes = [
        "Real compute: ViT blocks of width 240 (six heads, MLP ratio 2), 64 tokens, batch 32, "
        "N = 8, random images. Actors: two packed hosts with one torch thread each; the busiest "
        "has 6 of the 11 blocks. Overhead: wall time of a step minus the busiest actor's compute: "
        "its waiting for the other, Ray's calls, tensors on their way. Candidates timed in turn, "
        f"{bench.rounds} rounds of {timed.steps} steps; medians, speed-ups round by round. "
        "`stream`: transport=stream, else the object store.",
        "",
        f"`{APART}`: two processes that do not know of each other, each with the whole network "
        f"and one thread, so two steps are done; their speed-up counts both. They did {both:.2f} "
        "times the work of one process in the same time, so two actors, of which one has 6 of 11 "
        f"blocks, could reach {both * 11 / 12:.2f} at best in this run.",
        "",
        "`between steps`: the part of the overhead from the busiest actor's last adjoint to the "
        "z_0 of the next step, less its own work there (gradients of weights, report, update). "
        "With clip=1 norms hop to the other actor in that time, which updates the stem and opens "
        "the next batch, and z_0 hops back; without, the other actor is done before. "
        f"A bare hop through the object store (nothing else under way) cost {hops[2]:.1f} ms with "
        f"the state of 2 samples and {hops[32]:.1f} ms with that of 32 in this run.",
        *aim(rows),
    ]
    print(write_table(bench.out, "bench_step_ray", "Step time, two actors", rows, notes))


def done_by_two(seconds: Mapping[str, Sequence[float]]) -> float:
    """How many times the work of one process two processes do that have nothing to do with each
    other."""
    pairs = zip(seconds[APART], seconds[ONE], strict=True)
    return statistics.median(2 * alone / apart for apart, alone in pairs)


def aim(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The overhead of stream beside what it should be."""
    wanted = [r for r in rows if r["step"] == "2 actors, stream"]
    return [
        line
        for r in wanted
        for line in ("", f"Aim: an overhead of at most 5 ms with stream; it is {r[OVERHEAD]:.2f}.")
    ]


def wants(bench: BenchSettings, name: str) -> bool:
    """Whether the transport of a row was asked for."""
    return bench.transport in ("both", "stream" if name.endswith("stream") else "store")


def run_small(bench: BenchSettings, names: Sequence[str]) -> None:
    """The same with the small blocks of an MLP."""
    timed = Candidates(SMALL, bench.steps)
    timed.add_local(ONE, [], 1)
    try:
        for name in names:
            timed.add_ray(name, CUTS[name])
        timed.add_lone(APART)
        seconds = in_turn(timed.work, bench.rounds)
        rows = [row_of(name, timed, seconds) for name in timed.work]
    finally:
        timed.close()
    both = done_by_two(seconds)
    notes = [
        "Small blocks: sigmoid MLP of mnist_d3 with hidden 500, batch 64, N = 8, random images; "
        "otherwise as in bench_step_ray.md.",
        "",
        f"`{APART}`: no wire and no waiting, so two cores give no more than the {both:.2f} times "
        "the work of one process that they did; two actors, of which one has 6 of 11 blocks, "
        f"could reach {both * 11 / 12:.2f} at best in this run. By stream both actors compute at "
        "the same time and share the machine's memory; by store they rather take turns.",
    ]
    title = "Step time, two actors, small blocks"
    print(write_table(bench.out, "bench_step_ray_small", title, rows, notes))


def row_of(name: str, timed: Candidates, seconds: dict[str, list[float]]) -> dict[str, object]:
    """One line of the table."""
    done = 2 if name == APART else 1  # steps in that time
    row: dict[str, object] = {
        "step": name,
        "samples": 64 if timed.base is SMALL else 32,
        "ms (median)": 1000 * statistics.median(seconds[name]) / timed.steps,
        "speed-up over local, 1 thread": done / ratio(seconds, name, ONE),
        "busiest actor (ms)": "", OVERHEAD: "", "between steps (ms)": "",
        "calls per step": "", "MB moved per step": "",
    }  # fmt: skip
    if name in timed.engines:
        engine = timed.engines[name]
        settings = engine.job.settings
        pieces = cut(0, settings.batch, settings.microbatches)
        row["samples"] = " + ".join(str(len(piece.places)) for piece in pieces)
        row["busiest actor (ms)"] = 1000 * statistics.median(timed.busiest[name])
        row[OVERHEAD] = 1000 * statistics.median(timed.idle[name])
        row["between steps (ms)"] = 1000 * statistics.median(timed.ends[name])
        row["calls per step"] = engine.driver.calls_per_step
        row["MB moved per step"] = timed.moved(engine)
    return row
