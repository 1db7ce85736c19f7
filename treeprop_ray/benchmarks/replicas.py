"""bench replicas: copies of a tree on emulated devices, and two real actors shared in every way."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treeprop_ray.benchmarks.emulated import EmulatedHost
from treeprop_ray.benchmarks.peer import DDP, Images, Peer
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.span import as_the_paper
from treeprop_ray.benchmarks.step_ray import BASE, on_images
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.config import RaySettings
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine import Engine, runtime
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.stream import AutoDriver
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.copies import copied
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import Plan, pack
from treeprop_ray.schedule.tree import one_step

T = 0.02  # seconds of a block on the samples of one copy
ACTORS = 8  # processes that stand for the devices, or one for each copy
SIZES, DEVICES = (8, 32), (4, 16, 64)
STEPS, ROUNDS = 8, 3
TRANSPORTS = ("store", "stream")


def run(bench: BenchSettings) -> None:
    """Emulated devices."""
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
    print(write_table(bench.out, name, title, rows, [*NOTES, "", aim(rows)]))


def aim(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where trees times replicas do not come near enough to the ideal."""
    reached = {
        name: [r for r in rows if r[f"{name}, of the ideal (%)"] < 90] for name in TRANSPORTS
    }
    told = "; ".join(
        f"{name}: " + (", ".join(f"N = {r['N']} on {r['devices']}" for r in missed) or "none")
        for name, missed in reached.items()
    )
    return f"Aim: at least 90 % of the ideal. Missed by {told}."


def run_real(bench: BenchSettings) -> None:
    """Real compute on two cores."""
    name, title = "bench_replicas_real", "Two actors, shared in every way"
    print(write_table(bench.out, name, title, two_actors(bench), REAL))


# -- emulated -------------------------------------------------------------------------------------


def row_of(N: int, devices: int) -> dict[str, Any]:
    """Samples that pass per second, in units of what one copy has."""
    copies = devices // (N // 2)  # a tree uses N / 2 devices
    ideal = copies / (2 * Tree(N).depth * T)
    with Crowd(*tree_of(N, copies), partial(as_the_paper, T, 0)) as trees:
        reached = {
            (transport, sums): copies / trees.seconds(transport, sums)
            for transport in TRANSPORTS
            for sums in (True, False)
        }
    stages = min(devices, N)
    lines = devices // stages  # pipelines side by side
    with Crowd(*chain_of(stages, lines), partial(as_the_paper, T, N // stages)) as chains:
        chain = lines / chains.seconds("stream", True, rounds=1)
    row = {"N": N, "devices": devices, "trees": f"{copies} x {N // 2}", "ideal (shares/s)": ideal}
    for transport in TRANSPORTS:
        tree, apart = reached[transport, True], reached[transport, False]
        row[f"{transport} (shares/s)"] = tree
        row[f"{transport}, of the ideal (%)"] = round(100 * tree / ideal)
        row[f"{transport}, no sums, of the ideal (%)"] = round(100 * apart / ideal)
    return row | {
        "pipelines": f"{lines} x {stages}",
        "pipelines, 1 piece (shares/s)": chain,
        "data-parallel BP, ideal (shares/s)": devices / (2 * N * T),
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


class Crowd:
    """Emulated actors of several copies of some hosts; they play by either transport, and with or
    without adding up what has no bytes."""

    def __init__(
        self, calls: Sequence[Call], hosts: int, copies: int, price: Callable[[Call], float]
    ) -> None:
        self.hosts, self.copies, self.price = hosts, copies, price
        self.calls = copied(calls, hosts, copies, copies)
        self.clock = itertools.count()
        names = tuple(f"replicas/host-{h}" for h in range(hosts))
        self.plan = Plan(Layout({}), names, 0.01, 0.0, copies=copies)
        self.driver = AutoDriver(self.plan, self._roles(True), self.calls, clip=False, in_flight=2)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()

    def _roles(self, sums: bool) -> list[Role]:
        return [
            Role(
                name=name,
                about="emulated",
                make_host=partial(EmulatedHost, self.price, copies=self.copies),
                calls=tuple(c for c in self.calls if c.host == host),
                total=self.copies,
                pieces=self.copies,
                copy=host // self.hosts if sums else 0,
                copies=self.copies if sums else 1,
            )
            for host, name in enumerate(self.plan.actors)
        ]

    def seconds(self, transport: str, sums: bool, rounds: int = ROUNDS) -> float:
        """Seconds of a step of all copies, the median of some rounds."""
        driver = self.driver
        driver.wait()
        driver.streams = transport == "stream"
        # copies that do not add up are as many hosts of one copy
        apart = replace(self.plan, names=tuple(self.plan.actors), copies=1)
        driver.plan = self.plan if sums else apart
        driver.become(self._roles(sums), self.calls)
        measured = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            for step in itertools.islice(self.clock, STEPS):
                driver.step(step, False)
            driver.wait()
            measured.append((time.perf_counter() - began) / STEPS)
        return statistics.median(measured[1:])


NOTES = [
    f"**Emulated**: a block application is a sleep of {1000 * T:.0f} ms, gradients have no bytes. "
    f"Real: driver, schedule, futures, wires, messages by which copies add up. {ACTORS} actors, "
    "or one for each copy, stand for the devices; nodes of one level in one host sleep at the same "
    "time, as on devices of their own. All actors wake up on two cores, so what a message costs "
    "grows with the number of actors here; on machines of their own it would not.",
    "",
    "A tree uses N / 2 devices; with more, each copy of it has a share of its own. A share is what "
    "one copy works on in a step; `shares/s` are comparable from row to row. Ideal: copies / "
    "(2 D t), as the paper counts, without any hop. `no sums`: the same trees side by side, each "
    "for itself, on the same actors: what hops between actors on this machine leave of the ideal; "
    "the distance from there is what adding up costs. Transports in turn on the same actors.",
    "",
    "Pipelines: chains of at most N stages, without micro-batches, transport=stream. Data-parallel "
    "BP: devices / (2 N t), on paper: it has no waits at all, if the network and its optimizer fit "
    "on every device.",
]


# -- real -----------------------------------------------------------------------------------------

COMMON = [*BASE, "clip=0", "threads=1"]
ACTOR = [
    "engine=ray", "placement=packed", "ray.num_cpus=2", "cpus_per_actor=0.2", "transport=stream",
]  # fmt: skip
OURS = {  # two actors each
    "tree 2 x 1": ["hosts=2"],
    "tree 1 x 2": ["hosts=1", "replicas=2"],
    "tree 1 x 2, shards": ["hosts=1", "replicas=2", "shard_optimizer=true"],
    "chain 2 x 1, 4 pieces": ["method=bp", "hosts=2", "microbatches=4"],
    "chain 1 x 2 (data-parallel)": ["method=bp", "hosts=1", "replicas=2"],
}
PEERS = {"torch 1F1B, 2 stages, 4 pieces": "1F1B", "torch DDP, 2 workers": DDP}


def two_actors(bench: BenchSettings) -> list[dict[str, Any]]:
    """ViT blocks of width 240, N = 8, batch 32, two processes with one thread each."""
    steps, clock = max(2, bench.steps // 8), itertools.count()
    torch.set_num_threads(1)
    engines: dict[str, Engine] = {}
    peer = Peer(partial(Images, [*COMMON, "method=bp"]), 4, ddp=True)
    try:
        work: dict[str, Callable[[], None]] = {}
        for k, (name, words) in enumerate(OURS.items()):
            engines[name] = on_images([*COMMON, *ACTOR, *words, f"name=replicas-{k}"])
            work[name] = steps_of(engines[name], steps, clock)

        def of_torch(which: str) -> None:
            for step in itertools.islice(clock, steps):
                peer.ask(which, "step", step)

        work |= {name: partial(of_torch, which) for name, which in PEERS.items()}
        measured = in_turn(work, bench.rounds)
    finally:
        for engine in reversed(list(engines.values())):
            engine.close()
        peer.close()
    return [
        {
            "hosts x copies": name,
            "ms per step": 1000 * statistics.median(measured[name]) / steps,
            "time / tree 2 x 1": ratio(measured, name, "tree 2 x 1"),
            **{f"time / {other}": ratio(measured, name, other) for other in PEERS},
        }
        for name in measured
    ]


REAL = [
    "Real compute on two cores: ViT blocks of width 240, 64 tokens, batch 32, N = 8, random "
    "images, AdamW; two processes with one torch thread each, transport=stream. hosts x copies; "
    "torch: torch.distributed.pipelining and DistributedDataParallel over gloo, the same chain and "
    "optimizer. A tree does more work in a step than a chain: blocks beside the chain's. "
    "Candidates timed in turn, ratios round by round, medians. Two copies do the same work as two "
    "hosts, wait less for each other, and exchange gradients where the hosts exchange states.",
]
