"""bench vit: the full-size cifar10_vit on both engines, real images, time per step."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from treeprop_ray import config
from treeprop_ray.benchmarks import write_table

if TYPE_CHECKING:
    from treeprop_ray.bench import BenchSettings

CANDIDATES = {
    "TreeProp, local, 1 thread": [],
    "TreeProp, 2 actors, 1 thread each": [
        "engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "microbatches=2",
    ],
    "BP, local, 1 thread": ["method=bp"],
}  # fmt: skip


def seconds_per_step(words: list[str], steps: int) -> tuple[list[float], int]:
    """Seconds of each step but the first, as they come in, and the batch."""
    from treeprop_ray import data
    from treeprop_ray.train import build_engine

    settings = config.load(["experiment=cifar10_vit", "device=cpu", "in_flight=1", *words])
    engine = build_engine(settings, data.load(settings), total_steps=steps)
    try:
        found = []
        for step in range(steps):
            began = time.perf_counter()
            engine.step(step, report=True)
            engine.reports()
            found.append(time.perf_counter() - began)
    finally:
        engine.close()
    return found[1:], settings.batch


def run(bench: BenchSettings) -> None:
    """`steps` steps of each candidate, one after the other."""
    rows: list[dict[str, Any]] = []
    for name, words in CANDIDATES.items():
        seconds, batch = seconds_per_step(words, bench.steps)
        rows.append(
            {
                "engine": name,
                "steps": bench.steps,
                "batch": batch,
                "s per step (median)": statistics.median(seconds),
                "fastest": min(seconds),
                "slowest": max(seconds),
                "images/s": batch / statistics.median(seconds),
            }
        )
        print(f"{name}: {rows[-1]['s per step (median)']:.2f} s per step", flush=True)
    notes = [
        "The experiment `cifar10_vit` as it is (width 240, seven blocks and the head, 64 tokens, "
        "RandAugment, dropout, clipping), on the real CIFAR-10 images of `data.root`; the first "
        "step is not counted. One candidate after the other, so the ratios are rougher than those "
        "of bench_step_ray.md.",
    ]
    print(write_table(bench.out, "bench_vit", "Full-size cifar10_vit", rows, notes))
