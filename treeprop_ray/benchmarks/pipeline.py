"""bench pipeline: our chain of actors, the TreeProp waves and torch's own pipeline, in one run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from treeprop_ray.benchmarks.peer import SCHEDULES, Peer
from treeprop_ray.benchmarks.rehearsal import account
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.step_ray import BASE, on_actors, on_images
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.engine import Engine
from treeprop_ray.errors import TrainingError
from treeprop_ray.reporting.tables import write_table

PIECES = 4
CUT = f"microbatches={PIECES}"
COMMON = [*BASE, "clip=0", "threads=1"]
OURS = {  # on two actors
    "chain of actors": ["method=bp", CUT],
    "TreeProp waves, 1 piece": ["alpha=1", "beta=0"],
    f"TreeProp waves, {PIECES} pieces": ["alpha=1", "beta=0", CUT],
    "CFF+M chain of actors": ["method=cff"],
}
ONE = "BP, one process"


def run(bench: BenchSettings) -> None:
    """ViT blocks of width 240, N = 8, batch 32, two processes with one thread each."""
    steps = max(2, bench.steps // 8)
    torch.set_num_threads(1)
    clock = itertools.count()
    alone = on_images([*COMMON, "method=bp"])
    peer = Peer([*COMMON, "method=bp", CUT], PIECES)
    engines: dict[str, Engine] = {}
    try:
        check_same(alone, peer)

        def peers(name: str) -> Callable[[], None]:
            def go() -> None:
                for step in itertools.islice(clock, steps):
                    peer.ask("step", name, step)

            return go

        work: dict[str, Callable[[], None]] = {ONE: steps_of(alone, steps, clock)}
        work.update({f"torch {name}": peers(name) for name in SCHEDULES})
        for name, words in OURS.items():
            engines[name] = on_actors([*COMMON, "cpus_per_actor=0.2", *words])
            work[name] = steps_of(engines[name], steps, clock)
        seconds = in_turn(work, bench.rounds)
        peaks = {f"torch {name}": max(peer.ask("peak", name, next(clock))) for name in SCHEDULES}
    finally:
        for engine in reversed(list(engines.values())):
            engine.close()
        peer.close()
    rows = [row_of(name, seconds, steps, peaks.get(name)) for name in work]
    ours = [ratio(seconds, "chain of actors", f"torch {name}") for name in SCHEDULES]
    said = " and ".join(f"{r:.2f} (torch {n})" for r, n in zip(ours, SCHEDULES, strict=True))
    notes = [*NOTES, "", f"Time of our chain of actors over that of the peers: {said}. {WHY}"]
    print(write_table(bench.out, "bench_pipeline", "Pipelines of two processes", rows, notes))


def check_same(alone: Engine, peer: Peer) -> None:
    """The peer computes what we do: the same weights after three steps of each schedule."""
    for step in range(6):
        alone.step(step, report=False)
        peer.ask("step", SCHEDULES[step // 3], step)
    theirs = {k: torch.from_numpy(v) for part in peer.ask("weights") for k, v in part.items()}
    for name, mine in alone.state()[0].items():
        if not torch.allclose(mine, theirs[name], atol=1e-4):
            worst = float((mine - theirs[name]).abs().max())
            raise TrainingError(f"the peer's {name} differs from ours by {worst:.2g} after 6 steps")


def row_of(name: str, seconds: Any, steps: int, peak: int | None) -> dict[str, Any]:
    """Figures of one candidate; critical path and memory of ours are counted (rehearsal.py)."""
    words, actors = (["method=bp"], 1) if name == ONE else (OURS.get(name, ["method=bp", CUT]), 2)
    counted = account([*COMMON, *words], actors)
    a_step = statistics.median(seconds[name]) / steps
    return {
        "training": name,
        "ms per step": 1000 * a_step,
        "samples/s": 32 / a_step,
        "time / torch GPipe": ratio(seconds, name, "torch GPipe"),
        "work (blocks)": counted.work,
        "critical path (blocks)": counted.span if peak is None else gpipe_span(),
        "peak per process (MB)": (counted.peak if peak is None else peak) / 1e6,
    }


def gpipe_span(N: int = 8, stages: int = 2) -> float:
    """Forward and backward of all pieces through all stages; 1F1B has the same length."""
    return 2 * (PIECES + stages - 1) * (N / stages) / PIECES


WHY = (
    "Both do the same work (the weights agree, which is checked before timing); ours hands tensors "
    "over through Ray's object store and a call per stage and piece, torch sends them from process "
    "to process."
)
NOTES = [
    "Real compute on two cores: ViT blocks of width 240 (six heads, MLP ratio 2), 64 tokens, batch "
    f"32, N = 8, random images, AdamW. Two processes with one torch thread each; {PIECES} pieces "
    "where a batch is cut. torch GPipe and 1F1B: `torch.distributed.pipelining` over gloo, a "
    "process per stage. Candidates timed in turn, ratios round by round, medians.",
    "",
    "Work and critical path in block applications (forward 1, backward 1 on the whole batch), peak "
    "in bytes of tensors; see bench_accounting.md. TreeProp and CFF+M do more work per step than "
    "backpropagation: with two processes the span cannot pay for it, a step is as long as the work "
    "of the busier one.",
]
