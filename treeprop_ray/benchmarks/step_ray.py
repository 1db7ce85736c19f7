"""bench step engine=ray: real compute, two actors against one process, ViT-sized blocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from treeprop_ray import config
from treeprop_ray.benchmarks import in_turn, ratio, write_table
from treeprop_ray.config import Settings
from treeprop_ray.data import Batches, DataSet, Split
from treeprop_ray.data.images import unit_scale
from treeprop_ray.engine import local
from treeprop_ray.engine import ray as distributed
from treeprop_ray.engine.job import Job, parts_from_settings
from treeprop_ray.engine.ray import RayEngine
from treeprop_ray.models import blueprint
from treeprop_ray.network import STEM
from treeprop_ray.optim import OptimizerRule
from treeprop_ray.rule import Rule
from treeprop_ray.tree import Tree

if TYPE_CHECKING:
    from treeprop_ray.bench import BenchSettings

BASE = ["experiment=cifar10_vit", "batch=32", "model.dropout=0", "data.augment=none", "device=cpu"]
PACKED = ["engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "cpus_per_actor=0.3"]


def random_images(n: int = 256) -> DataSet:
    """CIFAR-shaped noise: timing needs no data set."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    split = Split(x, torch.arange(n) % 10)
    return DataSet("random", split, split, split, 10, unit_scale)


def random_batches(settings: Settings) -> Batches:
    """What the boundary actor trains on."""
    return Batches(random_images(), settings.batch, settings.seed)


def job_of(settings: Settings) -> Job:
    """A job on random images."""
    data = random_images()
    plan = blueprint(settings, data)
    stem = plan.build(STEM, settings.seed)
    return Job(
        tree=Tree(plan.N, settings.split),
        rule=Rule.of(settings, plan.family),
        optimizer=OptimizerRule.of(settings, 1000),
        parts=partial(parts_from_settings, settings, data.shape),
        batches=partial(random_batches, settings),
        stem_trains=any(p.requires_grad for p in stem.parameters()),
        batch=settings.batch,
        samples=len(data.train),
        splits=data.batch_counts,
    )


def launch(settings: Settings) -> RayEngine:
    """The Ray engine on random images."""
    return distributed.launch(job_of(settings), settings)


def run(bench: BenchSettings) -> None:
    """One thread and two threads locally, two packed actors with one thread each, BP."""
    steps = max(2, bench.steps // 8)
    engines: dict[str, RayEngine] = {}
    busy: dict[str, list[float]] = {}
    work: dict[str, Callable[[], None]] = {}
    clock = iter(range(1_000_000))

    def local_steps(words: list[str], threads: int) -> Callable[[], None]:
        engine = local.build(config.load([*BASE, *words]), random_images(), 1000)

        def go() -> None:
            torch.set_num_threads(threads)
            for _ in range(steps):
                engine.step(next(clock), report=False)

        return go

    def ray_steps(name: str, words: list[str]) -> Callable[[], None]:
        engine = engines[name] = launch(config.load([*BASE, *PACKED, *words]))
        busy[name] = []

        def go() -> None:
            engine.usage()
            began = time.perf_counter()
            for _ in range(steps):
                engine.step(next(clock), report=False)
            engine.reports()
            wall = time.perf_counter() - began
            busiest = max(seconds for seconds, _, _ in engine.usage())
            busy[name].append((wall - busiest) / steps)

        return go

    work["local, 1 thread"] = local_steps([], 1)
    work["local, 2 threads"] = local_steps([], 2)
    work["BP, 2 threads"] = local_steps(["method=bp"], 2)
    try:
        for m in (1, 2, 4):
            name = f"2 actors, {m} micro-batch{'es' if m > 1 else ''}"
            work[name] = ray_steps(name, [f"microbatches={m}"])
        seconds = in_turn(work, bench.rounds)
        rows = []
        for name in work:
            row: dict[str, object] = {
                "step": name,
                "ms (median)": 1000 * statistics.median(seconds[name]) / steps,
                "speed-up over local, 1 thread": 1 / ratio(seconds, name, "local, 1 thread"),
                "overhead (ms)": "", "calls per step": "", "MB moved per step": "",
            }  # fmt: skip
            if name in engines:
                engine = engines[name]
                engine.usage()
                engine.step(next(clock), report=False)
                moved = sum(sent for _, sent, _ in engine.usage())
                row["overhead (ms)"] = 1000 * statistics.median(busy[name])
                row["calls per step"] = engine.driver.calls_per_step
                row["MB moved per step"] = moved / 1e6
            rows.append(row)
    finally:
        for engine in reversed(list(engines.values())):
            engine.close()
    notes = [
        "Real compute: ViT blocks of width 240 (six heads, MLP ratio 2), 64 tokens, batch 32, "
        "N = 8, random images. Actors: two packed hosts with one torch thread each. Overhead: "
        "wall time of a step minus the compute of the busiest actor (which includes that actor's "
        "waiting for the other one's levels). Candidates timed in turn, "
        f"{bench.rounds} rounds of {steps} steps; medians.",
    ]
    print(write_table(bench.out, "bench_step_ray", "Step time, two actors", rows, notes))
