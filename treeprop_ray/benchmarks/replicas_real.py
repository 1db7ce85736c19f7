"""bench replicas_real: real compute of two actors, shared in every way, beside torch's own."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from treeprop_ray.benchmarks.peer import DDP, Images, Peer
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.step_ray import BASE, on_images
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.engine import Engine
from treeprop_ray.reporting.tables import write_table

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


def run(bench: BenchSettings) -> None:
    """Real compute on two cores."""
    name, title = "bench_replicas_real", "Two actors, shared in every way"
    print(write_table(bench.out, name, title, two_actors(bench), REAL))


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
