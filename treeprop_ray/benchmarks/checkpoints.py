"""bench checkpoint: checkpoints that actors write themselves, at two sizes of a network.

Every candidate runs in a fresh process, the driver, whose own peak memory is what counts here.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treeprop_ray import config
from treeprop_ray.benchmarks.gpt import BASE, measure
from treeprop_ray.benchmarks.random_data import random_job, random_text
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.engine import Engine, build
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.run import checkpoint, shards
from treeprop_ray.run.pace import SHARE
from treeprop_ray.run.storage import Disk

SHORT = [*BASE, "batch=1", "data.length=256"]
ACTORS = ["engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "cpus_per_actor=0.3"]
WIDTHS = {"width 192": ["model.hidden=192", "model.heads=12"], "GPT-2 small, width 768": []}
ROUNDS, STEPS = 3, 4  # checkpoints; steps before each of them, and after the last
META = {"epoch": 0, "N": 12, "split": "right_full", "best": {}, "wall_seconds": 0.0}


def by_actors(words: list[str], answer: Any) -> None:
    """Steps without and with a checkpoint under way, in turn; the driver's memory."""
    settings = config.load([*SHORT, *ACTORS, *words])
    with tempfile.TemporaryDirectory(prefix="treeprop-") as folder:
        engine = build(random_job(settings, random_text(settings)))
        disk, clock = Disk(Path(folder)), itertools.count()
        plain: list[list[float]] = []
        beside: list[list[float]] = []
        writing = []
        try:
            steps_of(engine, clock, 1)  # warm up
            for _ in range(ROUNDS):
                plain.append(steps_of(engine, clock, STEPS))
                done = next(clock)
                clock = itertools.count(done)
                for old in disk.names():
                    disk.remove(old)
                saving = shards.Saving(engine, disk, {"step": done, **META}, {})
                began = time.perf_counter()
                beside.append([])
                while not beside[-1] or not saving.arrived(wait=False):
                    beside[-1] += steps_of(engine, clock, 1)
                writing.append(time.perf_counter() - began)
                saving.commit()
            plain.append(steps_of(engine, clock, STEPS))
            done = next(clock)
            began = time.perf_counter()
            saving = shards.Saving(engine, disk, {"step": done, **META}, {})
            saving.arrived(wait=True)
            in_haste = time.perf_counter() - began
            for old in disk.names():
                disk.remove(old)
            saving.commit()
            size = sum(p.stat().st_size for p in Path(folder).glob("*/*"))
            began = time.perf_counter()
            engine.take_up(partial(shards.read_own, disk, done), done)
            reading = time.perf_counter() - began
        finally:
            engine.close()
        began = time.perf_counter()
        checkpoint.load(Path(folder), done)
        verifying = time.perf_counter() - began
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer.put((size, plain, beside, mean(writing), in_haste, reading, verifying, peak))


def costs(plain: Sequence[list[float]], beside: Sequence[list[float]]) -> list[float]:
    """By how much steps beside a checkpoint were longer than those before and after it."""
    around = [[*a, *b] for a, b in itertools.pairwise(plain)]
    return sorted(mean(b) / mean(a) - 1 for a, b in zip(around, beside, strict=True))


def by_torch(words: list[str], answer: Any) -> None:
    """torch.save and torch.load of the same state, in one process."""
    settings = config.load([*SHORT, *words])
    engine = build(random_job(settings, random_text(settings)))
    engine.step(0, report=False)
    state = engine.state()
    with tempfile.TemporaryDirectory(prefix="treeprop-") as folder:
        path = Path(folder) / "state.pt"
        began = time.perf_counter()
        torch.save(state, path)
        writing = time.perf_counter() - began
        began = time.perf_counter()
        torch.load(path)
        reading = time.perf_counter() - began
    answer.put((writing, reading))


def steps_of(engine: Engine, clock: Iterator[int], count: int) -> list[float]:
    """Seconds of each of the next steps."""
    out = []
    for step in itertools.islice(clock, count):
        began = time.perf_counter()
        engine.step(step, report=False)
        engine.reports()
        out.append(time.perf_counter() - began)
    return out


def mean(values: list[float]) -> float:
    """Of some seconds."""
    return sum(values) / max(1, len(values))


def run(bench: BenchSettings) -> None:
    """Two widths."""
    rows: list[dict[str, Any]] = []
    for name, words in WIDTHS.items():
        _, told = measure(by_actors, words)
        size, plain, beside, writing, in_haste, reading, verifying, peak = told
        _, (torch_writes, torch_reads) = measure(by_torch, words)
        rows.append(
            {
                "network": name,
                "checkpoint (MB)": size / 1e6,
                "driver's peak (MB)": peak / 1e6,
                "step (s)": mean(list(itertools.chain(*plain))),
                "step while writing (s)": mean(list(itertools.chain(*beside))),
                "cost (%)": round(100 * statistics.median(costs(plain, beside)), 1),
                "least and most (%)": ", ".join(
                    f"{100 * cost:.1f}" for cost in costs(plain, beside)[:: ROUNDS - 1]
                ),
                "steps while writing": sum(map(len, beside)),
                "write beside steps (s)": writing,
                "write, waited for (s)": in_haste,
                "read, 2 actors (s)": reading,
                "verify (s)": verifying,
                "torch.save (s)": torch_writes,
                "torch.load (s)": torch_reads,
            }
        )
    print(write_table(bench.out, "bench_checkpoint", "Checkpoints by actors", rows, NOTES))


NOTES = [
    f"""Networks of 12 blocks as in bench_gpt.md, at two widths, with the auxiliary blocks and the
state of AdamW; batch 1, windows of 256 random tokens, two actors with one thread each. {ROUNDS}
checkpoints, {STEPS} steps before each of them and after the last. `step while writing`: from when a
checkpoint was asked for until all parts were written, synced and summed (sha256), the copy of the
state included. `cost`: the mean of these over that of the {2 * STEPS} steps before and after, for
each checkpoint; the median, and the least and the most. Two actors on two cores leave no core to
the threads that write; these work for a {1 / SHARE:.0f}th of the time, so writing takes long,
except where somebody waits for it. `driver's peak`: the largest resident set of the driver's
process. `write beside steps`: mean. `write, waited for`: one more, while nothing else is done.
`read`: every actor its own parts. `verify`: checksums of all files, in one process. torch.save, in
one process, writes no checksums and does not sync. Aims: a peak under 1000 MB that does not grow
with the network, a cost under 5 %.""",
]
