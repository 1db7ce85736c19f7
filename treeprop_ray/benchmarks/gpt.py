"""bench gpt: GPT-2 small at full width, a few steps: peak memory, seconds and bytes sent per step.

Every candidate runs in a fresh process; its memory is the sum over that process and all that it
started (Ray's own processes and the actors among them), sampled while it runs.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treeprop_ray import config
from treeprop_ray.benchmarks.random_data import random_job, random_text
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.engine import RayEngine, build
from treeprop_ray.errors import TrainingError
from treeprop_ray.reporting.tables import write_table

SAMPLE = 0.1  # seconds between two looks at the memory
BASE = [
    "experiment=wikitext103_d4", "objective=node_all_ce", "precision=float32", "device=cpu",
    "timeline_steps=0",
]  # fmt: skip
CANDIDATES = {
    "BP, one process, 2 threads": ["method=bp", "threads=2"],
    "TreeProp, one process, 2 threads": ["threads=2"],
    "TreeProp, 2 Ray actors of 1 thread": [
        "engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "cpus_per_actor=0.3",
    ],
    "the same, transport=stream": [
        "engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "cpus_per_actor=0.3",
        "transport=stream",
    ],
    "the same, and a copy of the head": [
        "engine=ray", "placement=packed", "hosts=2", "ray.num_cpus=2", "cpus_per_actor=0.3",
        "transport=stream", "head_copies=1",
    ],
}  # fmt: skip


def work(words: list[str], steps: int, answer: Any) -> None:
    """Some steps of one candidate, in a process of its own; the first one is not timed."""
    settings = config.load(words)
    engine = build(random_job(settings, random_text(settings)))
    actors = engine if isinstance(engine, RayEngine) else None
    try:
        began, sent, losses = 0.0, 0, []
        for step in range(steps):
            if step == 1:
                began = time.perf_counter()
                if actors:
                    actors.usage()
            engine.step(step, report=False)
            terms = [t for r in engine.reports() for t in r.losses.values()]
            losses.append(min(t["ce"] for t in terms if "ce" in t))
        seconds = (time.perf_counter() - began) / (steps - 1)
        if actors:
            sent = sum(n for _, n, _ in actors.usage()) // (steps - 1)
        answer.put((seconds, sent, losses))
    finally:
        engine.close()


def family_of(root: int) -> list[int]:
    """A process and all its descendants."""
    parent: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:  # has ended meanwhile
            continue
        parent[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    family = [root]
    for pid in family:
        family += [child for child, of in parent.items() if of == pid]
    return family


def memory_of(root: int) -> int:
    """Bytes held by a process and its descendants; pages that several share count once."""
    total = 0
    for pid in family_of(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def measure(target: Callable[..., None], *args: Any) -> tuple[int, Any]:
    """(peak bytes, answer) of a function in a fresh process."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=target, args=(*args, answer))
    process.start()
    assert process.pid is not None
    peak, told = 0, None
    while process.is_alive():
        peak = max(peak, memory_of(process.pid))
        if not answer.empty():
            told = answer.get()
        process.join(SAMPLE)
    if not answer.empty():
        told = answer.get()
    if told is None:
        raise TrainingError(f"a candidate of bench gpt ended with exit code {process.exitcode}")
    return peak, told


def run(bench: BenchSettings) -> None:
    """The candidates one after the other."""
    if not Path("/proc/self/smaps_rollup").is_file():
        raise TrainingError("bench gpt reads memory from /proc/<pid>/smaps_rollup; needs Linux")
    steps, size = max(2, bench.steps), [f"batch={bench.batch}", f"data.length={bench.length}"]
    rows: list[dict[str, Any]] = []
    for name, words in CANDIDATES.items():
        peak, (seconds, sent, losses) = measure(work, [*BASE, *size, *words], steps)
        rows.append(
            {
                "candidate": name,
                "peak memory (GiB)": peak / 2**30,
                "seconds per step": seconds,
                "MB sent per step": sent / 1e6 if sent else "-",
                "cross-entropy, first and last step": f"{losses[0]:.2f}, {losses[-1]:.2f}",
            }
        )
    notes = [
        "GPT-2 small at full width: 12 blocks of width 768 (the last one in front of the "
        "language-model head), vocabulary 50257, 124.44M deployed parameters; TreeProp trains the "
        "auxiliary blocks as well. float32, AdamW, alpha 1, beta 0.5, CE at every spine node. "
        f"Batch {bench.batch}, windows of {bench.length} random tokens, {steps} steps, the first "
        "not timed. Memory: proportional set size of the process and all it starts (driver, Ray's "
        f"processes, actors, object store), sampled every {SAMPLE:g} s from start to end.",
    ]
    print(write_table(bench.out, "bench_gpt", "GPT-2 small at full width", rows, notes))
