"""bench vit: the full-size cifar10_vit, real images: time per step, and the wait for data."""

from __future__ import annotations

import statistics
import time
from typing import Any

from treeprop_ray import config, data
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.engine import build
from treeprop_ray.methods import job_of
from treeprop_ray.reporting.tables import write_table

LOCAL = {"TreeProp, local, 1 thread": [], "BP, local, 1 thread": ["method=bp"]}
RAY = {
    "TreeProp, 2 actors, 1 thread each": [
        "engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "microbatches=2",
    ],
}  # fmt: skip
NOTE = (
    "The experiment `cifar10_vit` as it is (width 240, seven blocks and the head, 64 tokens, "
    "RandAugment, dropout, clipping), on the real CIFAR-10 images of `data.root`; the first step "
    "is not counted. One candidate after the other, local and Ray in commands of their own: the "
    "ratios are rougher than those of [bench_step_ray](bench_step_ray.md). waiting for data: the "
    "share of the step time in which the boundary makes the batch (crop, flip, RandAugment) and "
    "the blocks wait for it."
)


def measure(words: list[str], steps: int) -> tuple[list[float], float, int]:
    """Seconds of each step but the first, the share of them spent on data, and the batch."""
    settings = config.load(["experiment=cifar10_vit", "device=cpu", "in_flight=1", *words])
    engine = build(job_of(settings, data.load(settings), steps))
    seconds, on_data = [], []
    try:
        for step in range(steps):
            began = time.perf_counter()
            engine.step(step, report=True)
            reports = engine.reports()
            seconds.append(time.perf_counter() - began)
            on_data.append(sum(r.data_seconds for r in reports))  # since the start
    finally:
        engine.close()
    return seconds[1:], (on_data[-1] - on_data[0]) / sum(seconds[1:]), settings.batch


def run(bench: BenchSettings) -> None:
    """`steps` steps of TreeProp, a quarter of them of BP, one candidate after the other."""
    rows: list[dict[str, Any]] = []
    for name, words in (RAY if bench.engine == "ray" else LOCAL).items():
        steps = max(2, bench.steps // 4 if "method=bp" in words else bench.steps)
        seconds, on_data, batch = measure(words, steps)
        rows.append(
            {
                "engine": name,
                "steps": steps,
                "batch": batch,
                "s per step (median)": statistics.median(seconds),
                "fastest": min(seconds),
                "slowest": max(seconds),
                "images/s": batch / statistics.median(seconds),
                "waiting for data (%)": 100 * on_data,
            }
        )
        print(f"{name}: {rows[-1]['s per step (median)']:.2f} s per step", flush=True)
    ray = bench.engine == "ray"
    name, where = ("bench_vit_ray", "two Ray actors") if ray else ("bench_vit", "one process")
    print(write_table(bench.out, name, f"Full-size cifar10_vit, {where}", rows, [NOTE]))
