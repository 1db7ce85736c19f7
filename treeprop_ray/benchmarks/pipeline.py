"""bench pipeline: our chain of actors, the TreeProp waves and torch's own pipelines, in one run.

Real compute on two processes; pipeline_span.py has more stages than micro-batches, emulated.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from treeprop_ray.benchmarks.peer import Images, Peer
from treeprop_ray.benchmarks.rehearsal import account
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.step_ray import BASE, on_actors, on_images
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.engine import Engine
from treeprop_ray.errors import TrainingError
from treeprop_ray.reporting.tables import markdown, write_table

PIECES = (1, 2, 4, 8)
COMMON = [*BASE, "clip=0", "threads=1"]
WAVES = ["alpha=1", "beta=0"]
OURS = {  # on two actors
    "chain of actors, store": ["method=bp"],
    "chain of actors, stream": ["method=bp", "transport=stream"],
    "TreeProp waves, store": WAVES,
    "TreeProp waves, stream": [*WAVES, "transport=stream"],
}
ONE, BASELINE = "BP, one process", "torch GPipe"


def run(bench: BenchSettings) -> None:
    """ViT blocks of width 240, N = 8, batch 32, two processes with one thread each."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for pieces in PIECES:
        rows += rows_of(pieces, max(2, bench.steps // 8), bench.rounds)
        print(markdown(rows), flush=True)
    print(write_table(bench.out, "bench_pipeline", "Pipelines of two processes", rows, NOTES))


def rows_of(pieces: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """All candidates with a batch cut into so many pieces, timed in turn."""
    cut, clock = f"microbatches={pieces}", itertools.count()
    alone = on_images([*COMMON, "method=bp", cut])
    peer = Peer(partial(Images, [*COMMON, "method=bp"]), pieces)
    engines: dict[str, Engine] = {}
    try:
        for name in peer.schedules:
            check_same(peer, name, cut)
        work: dict[str, Callable[[], None]] = {ONE: steps_of(alone, steps, clock)}
        for name in peer.schedules:
            work[f"torch {name}"] = partial(ask_steps, peer, name, steps, clock)
        for name, words in OURS.items():
            engines[name] = on_actors([*COMMON, "cpus_per_actor=0.2", cut, *words])
            work[name] = steps_of(engines[name], steps, clock)
        seconds = in_turn(work, rounds)
        peaks = {f"torch {n}": max(peer.ask(n, "peak", next(clock))) for n in peer.schedules}
    finally:
        for engine in reversed(list(engines.values())):
            engine.close()
        peer.close()
    return [row_of(name, pieces, seconds, steps, peaks) for name in work]


def ask_steps(peer: Peer, name: str, steps: int, clock: itertools.count[int]) -> None:
    """The next steps of a schedule of torch's."""
    for step in itertools.islice(clock, steps):
        peer.ask(name, "step", step)


def check_same(peer: Peer, name: str, cut: str) -> None:
    """The peer computes what we do: the same weights after three steps."""
    alone = on_images([*COMMON, "method=bp", cut])
    for step in range(3):
        alone.step(step, report=False)
        peer.ask(name, "step", step)
    asked = peer.ask(name, "weights")
    theirs = {k: torch.from_numpy(v) for part in asked for k, v in part.items()}
    for key, mine in alone.state()[0].items():
        if not torch.allclose(mine, theirs[key], atol=1e-4):
            worst = float((mine - theirs[key]).abs().max())
            raise TrainingError(f"{name}: {key} differs from ours by {worst:.2g} after 3 steps")


def row_of(
    name: str,
    pieces: int,
    seconds: Mapping[str, Sequence[float]],
    steps: int,
    peaks: Mapping[str, int],
) -> dict[str, Any]:
    """Figures of one candidate; work and memory of ours are counted (rehearsal.py)."""
    words = [*OURS.get(name, ["method=bp"]), f"microbatches={pieces}"]
    counted = account([*COMMON, *words], 1 if name == ONE else 2)
    return {
        "micro-batches": pieces,
        "training": name,
        "ms per step": 1000 * statistics.median(seconds[name]) / steps,
        f"time / {BASELINE}": ratio(seconds, name, BASELINE),
        "work (blocks)": counted.work,
        "peak per process (MB)": peaks.get(name, counted.peak) / 1e6,
    }


NOTES = [
    "Real compute on two cores: ViT blocks of width 240 (six heads, MLP ratio 2), 64 tokens, batch "
    "32, N = 8, random images, AdamW. Two processes with one torch thread each. torch GPipe, 1F1B "
    "(which wants as many micro-batches as stages) and zero bubble (ScheduleZBVZeroBubble, two "
    "stages in each process): `torch.distributed.pipelining` over gloo; their weights agree with "
    "ours, which is checked before timing. Candidates timed in turn, ratios round by round.",
    "",
    "Work in block applications (forward 1, backward 1 on the whole batch), peak in bytes of "
    "tensors; see bench_accounting.md. TreeProp does more work per step than backpropagation: with "
    "two processes the span cannot pay for it, a step is as long as the work of the busier one. "
    "bench_pipeline_span.md has a device for each stage.",
]
