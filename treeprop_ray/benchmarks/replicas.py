"""bench replicas: copies of a tree on emulated devices, and two real actors shared in every way."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treeprop_ray.benchmarks.emulated import EmulatedHost
from treeprop_ray.benchmarks.peer import Peer
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.span import as_the_paper
from treeprop_ray.benchmarks.step_ray import BASE, on_images
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.config import RaySettings
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine import Engine, runtime
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.driver import Driver
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.copies import copied
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import Plan, pack
from treeprop_ray.schedule.tree import one_step

T = 0.02  # seconds of a block on the samples of one copy
ACTORS = 8  # processes that stand for the devices, or one for each copy
SIZES, DEVICES = (8, 32), (4, 16, 64)
STEPS, ROUNDS = 3, 5


def run(bench: BenchSettings) -> None:
    """Both tables."""
    rows = []
    runtime.start(RaySettings())
    try:
        for N in SIZES:
            for devices in DEVICES:
                if devices >= N // 2:  # with fewer a tree is no wave per level any more
                    rows.append(row_of(N, devices))
                    print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    finally:
        runtime.stop()
    name, title = "bench_replicas", "Trees times replicas on emulated devices"
    print(write_table(bench.out, name, title, rows, NOTES))
    real = two_actors(bench)
    print(write_table(bench.out, f"{name}_real", "Two actors, shared in every way", real, REAL))


# -- emulated -------------------------------------------------------------------------------------


def row_of(N: int, devices: int) -> dict[str, Any]:
    """Samples that pass per second, in units of what one copy has."""
    copies = devices // (N // 2)  # a tree uses N / 2 devices
    depth = Tree(N).depth
    tree = copies / seconds(*tree_of(N, copies), partial(as_the_paper, T, 0))
    ideal = copies / (2 * depth * T)
    stages = min(devices, N)
    lines = devices // stages  # pipelines side by side
    chain = lines / seconds(*chain_of(stages, lines), partial(as_the_paper, T, N // stages))
    parallel = devices / (2 * N * T)
    return {
        "N": N,
        "devices": devices,
        "trees": f"{copies} x {N // 2}",
        "shares/s": tree,
        "ideal": ideal,
        "reached (%)": round(100 * tree / ideal),
        "pipelines": f"{lines} x {stages}",
        "pipelines, 1 piece (shares/s)": chain,
        "data-parallel BP, ideal (shares/s)": parallel,
    }


def tree_of(N: int, copies: int) -> tuple[list[Call], int, int]:
    """Calls, hosts and copies of trees."""
    hosts = max(1, min(4, N // 2, ACTORS // copies))
    tree = Tree(N)
    layout = replace(pack(tree, hosts), one_machine=True)
    rule = Rule(objective="node_all_ce")
    # not gathered: a host stands for many devices, which wait for each other's levels
    return one_step(tree, rule, layout, True, copies, gathered=False), hosts, copies


def chain_of(stages: int, copies: int) -> tuple[list[Call], int, int]:
    """Calls, hosts and copies of pipelines; neighbours share an actor."""
    hosts = max(1, min(4, stages, ACTORS // copies))
    calls = one_chain_step(stages, True, copies)
    return [replace(c, host=c.host * hosts // stages) for c in calls], hosts, copies


def seconds(
    calls: Sequence[Call], hosts: int, copies: int, price: Callable[[Call], float]
) -> float:
    """Seconds of a step of all copies, the median of some rounds."""
    names = tuple(f"replicas/host-{h}" for h in range(hosts))
    plan = Plan(Layout({}), names, 0.01, 0.0, copies=copies)
    shared = copied(calls, hosts, copies, copies)
    roles = [
        Role(
            name=name,
            about="emulated",
            make_host=partial(EmulatedHost, price, copies=copies),
            calls=tuple(c for c in shared if c.host == host),
            total=copies,
            pieces=copies,
        )
        for host, name in enumerate(plan.actors)
    ]
    driver = Driver(plan, roles, shared, clip=False, in_flight=2)
    clock, measured = itertools.count(), []
    try:
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            for step in itertools.islice(clock, STEPS):
                driver.step(step, False)
            driver.wait()
            measured.append((time.perf_counter() - began) / STEPS)
    finally:
        driver.close()
    return statistics.median(measured[1:])


NOTES = [
    f"**Emulated**: a block application is a sleep of {1000 * T:.0f} ms, gradients have no bytes. "
    f"Real: driver, schedule, futures, the calls by which copies add up. {ACTORS} actors, or one "
    "for each copy, stand for the devices; nodes of one level in one host sleep at the same time, "
    "as on devices of their own.",
    "",
    "A tree uses N / 2 devices; with more, each copy of it has a share of its own. A share is what "
    "one copy works on in a step; `shares/s` are comparable from row to row. Ideal: copies / "
    "(2 D t), as the paper counts. Pipelines: chains of at most N stages, without micro-batches. "
    "Data-parallel BP: devices / (2 N t), on paper: it has no waits at all, if the network and its "
    "optimizer fit on every device.",
]


# -- real -----------------------------------------------------------------------------------------

COMMON = [*BASE, "clip=0", "threads=1"]
ACTOR = ["engine=ray", "placement=packed", "ray.num_cpus=2", "cpus_per_actor=0.2"]
OURS = {  # two actors each
    "tree 2 x 1": ["hosts=2"],
    "tree 1 x 2": ["hosts=1", "replicas=2"],
    "tree 1 x 2, shards": ["hosts=1", "replicas=2", "shard_optimizer=true"],
    "chain 2 x 1, 4 pieces": ["method=bp", "hosts=2", "microbatches=4"],
    "chain 1 x 2 (data-parallel)": ["method=bp", "hosts=1", "replicas=2"],
}
PEER = "torch 1F1B, 4 pieces"


def two_actors(bench: BenchSettings) -> list[dict[str, Any]]:
    """ViT blocks of width 240, N = 8, batch 32, two processes with one thread each."""
    steps, clock = max(2, bench.steps // 8), itertools.count()
    torch.set_num_threads(1)
    engines: dict[str, Engine] = {}
    peer = Peer([*COMMON, "method=bp", "microbatches=4"], 4)
    try:
        work: dict[str, Callable[[], None]] = {}
        for name, words in OURS.items():
            engines[name] = on_images([*COMMON, *ACTOR, *words])
            work[name] = steps_of(engines[name], steps, clock)

        def peers() -> None:
            for step in itertools.islice(clock, steps):
                peer.ask("step", "1F1B", step)

        measured = in_turn({**work, PEER: peers}, bench.rounds)
    finally:
        for engine in reversed(list(engines.values())):
            engine.close()
        peer.close()
    return [
        {
            "hosts x copies": name,
            "ms per step": 1000 * statistics.median(measured[name]) / steps,
            "time / tree 2 x 1": ratio(measured, name, "tree 2 x 1"),
            f"time / {PEER}": ratio(measured, name, PEER),
        }
        for name in measured
    ]


REAL = [
    "Real compute on two cores: ViT blocks of width 240, 64 tokens, batch 32, N = 8, random "
    "images, AdamW; two processes with one torch thread each, transport=store. hosts x copies. "
    "Candidates timed in turn, ratios round by round, medians. Two copies do the same work as two "
    "hosts, wait less for each other, and exchange gradients where the hosts exchange states.",
]
