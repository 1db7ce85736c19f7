"""bench checkpoint: checkpoints that actors write themselves, at two sizes of a network.

Every candidate runs in a fresh process, the driver, whose own peak memory is what counts here.
"""

from __future__ import annotations

import resource
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treeprop_ray import config
from treeprop_ray.benchmarks.gpt import BASE, measure
from treeprop_ray.benchmarks.random_data import random_job, random_text
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.engine import build
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.run import checkpoint, shards
from treeprop_ray.run.storage import Disk

SHORT = [*BASE, "batch=1", "data.length=64"]  # steps are short: a checkpoint is long beside them
ACTORS = ["engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "cpus_per_actor=0.3"]
WIDTHS = {"width 192": ["model.hidden=192", "model.heads=12"], "GPT-2 small, width 768": []}
STEPS = 6
META = {"epoch": 0, "N": 12, "split": "right_full", "best": {}, "wall_seconds": 0.0}


def by_actors(words: list[str], answer: Any) -> None:
    """Steps without and with a checkpoint under way; the driver's memory."""
    settings = config.load([*SHORT, *ACTORS, *words])
    with tempfile.TemporaryDirectory(prefix="treeprop-") as folder:
        engine = build(random_job(settings, random_text(settings)))
        try:
            plain = steps_of(engine, range(STEPS))[1:]
            saving = shards.Saving(engine, Disk(Path(folder)), {"step": STEPS, **META}, {})
            began, beside = time.perf_counter(), []
            step = STEPS
            while not saving.arrived(wait=False):
                beside += steps_of(engine, range(step, step + 1))
                step += 1
            writing = time.perf_counter() - began
            saving.commit()
            size = sum(p.stat().st_size for p in Path(folder).glob("*/*"))
            began = time.perf_counter()
            engine.take_up(partial(shards.read_own, Disk(Path(folder)), STEPS), STEPS)
            reading = time.perf_counter() - began
        finally:
            engine.close()
        began = time.perf_counter()
        checkpoint.load(Path(folder), STEPS)
        verifying = time.perf_counter() - began
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer.put((size, mean(plain), mean(beside), writing, reading, verifying, peak))


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


def steps_of(engine: Any, steps: range) -> list[float]:
    """Seconds of each step."""
    out = []
    for step in steps:
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
        size, plain, beside, writing, reading, verifying, peak = told
        _, (torch_writes, torch_reads) = measure(by_torch, words)
        rows.append(
            {
                "network": name,
                "checkpoint (MB)": size / 1e6,
                "driver's peak (MB)": peak / 1e6,
                "step (s)": plain,
                "step while writing (s)": beside,
                "cost (%)": round(100 * (beside / plain - 1)),
                "write, 2 actors (s)": writing,
                "read, 2 actors (s)": reading,
                "verify (s)": verifying,
                "torch.save (s)": torch_writes,
                "torch.load (s)": torch_reads,
            }
        )
    print(write_table(bench.out, "bench_checkpoint", "Checkpoints by actors", rows, NOTES))


NOTES = [
    f"""Networks of 12 blocks as in bench_gpt.md, at two widths, with the auxiliary blocks and the
state of AdamW; batch 1, windows of 64 random tokens, two actors with one thread each. `step`: mean
of {STEPS - 1} steps; `step while writing`: mean of the steps from when the checkpoint was asked
for until all parts were written, synced and summed (sha256), the copy of the state included; two
actors on two cores leave their writing threads no core of their own. `driver's peak`: the largest
resident set of the driver's process. `read`: every actor its own parts. `verify`: checksums of all
files, in one process. torch.save, in one process, writes no checksums and does not sync.""",
]
