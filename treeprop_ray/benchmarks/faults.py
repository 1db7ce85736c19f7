"""bench faults: kill -9 of actors at random moments; bench snapshots: what recovery points cost.

faults: twenty kills over two runs of each transport, an actor per node and packed actors: how long
a kill holds the run up, how many steps are replayed, and whether the weights are those of a run in
one process that nobody disturbed. snapshots: the time of a step with and without recovery points,
in turn.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from treeprop_ray import config, data
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.engine import RayEngine, build, runtime
from treeprop_ray.hosts.base import State
from treeprop_ray.methods import job_of
from treeprop_ray.reporting.tables import write_table

WORDS = ["model.blocks=5", "model.hidden=32", "batch=64", "model.activation=tanh", "alpha=1",
         "beta=0.5", "sigma=0.05", "clip=0.5", "timeline_steps=0", "device=cpu"]  # fmt: skip
RAY = ["engine=ray", "ray.num_cpus=2"]
RUNS = {
    "an actor per node (6)": (["placement=per_node"], 12),
    "2 packed actors": (["placement=packed", "hosts=2"], 8),
}
QUIET = 20  # undisturbed steps at the beginning, for the time of a step
BETWEEN = 12  # steps from kill to kill
SNAPSHOT_EVERY = 5  # during the kills
SIZES = {"hidden 64": ["model.hidden=64"], "hidden 512": ["model.hidden=512", "batch=128"]}


def run(bench: BenchSettings) -> None:
    """bench faults."""
    owns = runtime.start(config.RaySettings(num_cpus=2))
    try:
        rows = [
            kill_run(f"{name}, {transport}", [*words, f"transport={transport}"], count)
            for transport in ("store", "stream")
            if bench.transport in (transport, "both")
            for name, (words, count) in RUNS.items()
        ]
    finally:
        if owns:
            runtime.stop()
    print(write_table(bench.out, "bench_faults", "Killed actors", rows, [
        f"One actor at a time is killed (SIGKILL) at a random moment of a step, every {BETWEEN} "
        f"steps, each actor about equally often; a recovery point every {SNAPSHOT_EVERY} steps. "
        "N = 6, digits, 2 cores. Seconds lost per kill: wall time beyond that of as many "
        "undisturbed steps, divided by the kills; most of it is the start of a process that "
        "imports torch. Weights equal: weights and optimizer state bit for bit those of the local "
        "engine after the same steps.",
    ]))  # fmt: skip


def run_snapshots(bench: BenchSettings) -> None:
    """bench snapshots."""
    owns = runtime.start(config.RaySettings(num_cpus=2))
    try:
        rows = [snapshot_cost(name, words, bench.rounds) for name, words in SIZES.items()]
    finally:
        if owns:
            runtime.stop()
    every = config.Settings().snapshot_every
    print(write_table(bench.out, "bench_snapshots", "What recovery points cost", rows, [
        f"2 packed actors, N = 8, digits; {every} steps per timing with one recovery point in the "
        f"middle (snapshot_every={every}, the default) and without, in turn, {bench.rounds} "
        "rounds; medians, and the median of the ratios of neighbouring timings.",
    ]))  # fmt: skip


def kill_run(name: str, words: list[str], kills: int) -> dict[str, Any]:
    """A run in which `kills` actors die; a row of the table."""
    words = [*WORDS, *words, f"snapshot_every={SNAPSHOT_EVERY}", f"max_failures={2 * kills}"]
    dice = random.Random(7)
    total = QUIET + kills * BETWEEN
    engine = on_actors(words, total)
    try:
        engine.step(0, report=False)
        engine.reports()
        began = time.perf_counter()
        for step in range(1, QUIET):
            engine.step(step, report=False)
        engine.reports()
        step_seconds = (time.perf_counter() - began) / (QUIET - 1)
        deck: list[int] = []
        began = time.perf_counter()
        for step in range(QUIET, total):
            kills_now = (step - QUIET) % BETWEEN == BETWEEN // 2
            if kills_now:
                hosts = range(len(engine.driver.actors))
                deck = deck or dice.sample(hosts, len(hosts))
                victim = pid_of(engine, deck.pop())  # asked first: an answer waits for its turn
            engine.step(step, report=False)
            if kills_now:
                time.sleep(dice.uniform(0, step_seconds))
                os.kill(victim, signal.SIGKILL)
        state = engine.state()
        lost = time.perf_counter() - began - (total - QUIET) * step_seconds
        recoveries, replayed = engine.recovery.failures, engine.recovery.replayed
    finally:
        engine.close()
    return {
        "placement": name,
        "steps": total,
        "kills": kills,
        "recoveries": recoveries,
        "steps replayed": replayed,
        "seconds lost per kill": lost / kills,
        "ms per step, undisturbed": 1000 * step_seconds,
        "weights equal": str(equal(state, undisturbed(total))).lower(),
    }


def on_actors(words: list[str], steps: int) -> RayEngine:
    """The Ray engine for a run of so many steps."""
    settings = config.load([*words, *RAY])
    engine = build(job_of(settings, data.load(settings), steps))
    assert isinstance(engine, RayEngine)
    return engine


def pid_of(engine: RayEngine, host: int) -> int:
    """The process of an actor; earlier losses that were not noticed yet are mended first."""

    def ask() -> int:
        actor = engine.driver.actors[host]
        pid: int = engine.driver.get([actor.__ray_call__.remote(lambda self: os.getpid())])[0]
        return pid

    return engine.guarded(ask)


def undisturbed(steps: int) -> State:
    """The state of a run in this process."""
    torch.set_num_threads(1)
    settings = config.load(WORDS)
    engine = build(job_of(settings, data.load(settings), steps))
    for step in range(steps):
        engine.step(step, report=False)
    return engine.state()


def equal(state: State, expected: State) -> bool:
    """Whether weights and optimizer state are the same, bit for bit."""
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[k], v) for k, v in theirs.items())
        for mine, theirs in zip(state, expected, strict=True)
    )


def snapshot_cost(name: str, words: list[str], rounds: int) -> dict[str, Any]:
    """Step time of one engine with recovery points switched on and off, in turn."""
    every = config.Settings().snapshot_every
    place = ["placement=packed", "hosts=2", "timeline_steps=0"]
    engine = on_actors([*words, *place], 10**6)
    settings = engine.recovery.settings
    # from half of `every` on, so that a point falls into the middle of a timing
    work = steps_of(engine, every, itertools.count(every // 2))

    def steps(snapshot_every: int) -> Callable[[], None]:
        def go() -> None:
            engine.recovery.settings = replace(settings, snapshot_every=snapshot_every)
            work()

        return go

    try:
        seconds = in_turn({"with": steps(every), "without": steps(10**9)}, rounds)
        size = sum(v.numel() * v.element_size() for part in engine.state() for v in part.values())
        points = engine.recovery.point[0] // every
    finally:
        engine.close()
    assert points > 0, "no recovery point was made"
    return {
        "network": name,
        "state (MB)": size / 1e6,
        "ms per step, without": 1000 * statistics.median(seconds["without"]) / every,
        "ms per step, with": 1000 * statistics.median(seconds["with"]) / every,
        "cost (%)": 100 * (ratio(seconds, "with", "without") - 1),
    }
