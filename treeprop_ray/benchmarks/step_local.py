"""bench step: a TreeProp step against a backpropagation step of the same chain."""

from __future__ import annotations

import itertools
import statistics

from treeprop_ray import config, engine
from treeprop_ray.benchmarks.random_data import MNIST, random_images, random_job
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.reporting.tables import write_table

BASE = ["experiment=mnist_d3", "model.hidden=500", "batch=64", "threads=1"]
CANDIDATES = {
    "bp": ["method=bp"],
    "tree, beta = 0": ["alpha=1", "beta=0"],
    "tree, beta = 0.5": ["alpha=0.5", "beta=0.5"],
}


def run(bench: BenchSettings) -> None:
    """Sigmoid MLP, N = 8, hidden 500, batch 64."""
    data, clock = random_images(4096, MNIST), itertools.count()
    work, applications = {}, {}
    for name, words in CANDIDATES.items():
        job = random_job(config.load([*BASE, *words]), data)
        work[name] = steps_of(engine.build(job), bench.steps, clock)
        applications[name] = job.method.outline(job.settings, job.tree).applications
    seconds = in_turn(work, bench.rounds)
    rows = [
        {
            "step": name,
            "ms (median)": 1000 * statistics.median(seconds[name]) / bench.steps,
            "time / bp": ratio(seconds, name, "bp"),
            "block applications": applications[name],
            "applications / bp": applications[name] / applications["bp"],
        }
        for name in work
    ]
    notes = [
        "Sigmoid MLP, N = 8, hidden 500, batch 64, MNIST-shaped random input, one torch thread. "
        f"Median over {bench.rounds} rounds of {bench.steps} steps, candidates timed in turn; a "
        "ratio is taken round by round. Block applications count every forward of a block (the "
        "head counts); each has one backward.",
    ]
    print(write_table(bench.out, "bench_step", "Step time, one process", rows, notes))
