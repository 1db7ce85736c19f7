"""bench pipeline_span: waves and pipelines with a device for every process, emulated.

A block is a sleep for its forward, for the gradient of its input and for that of its weights, each
as long as its share of the batch wants; all processes, packets, schedules and drivers are real.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from treeprop_ray.benchmarks.emulated import Emulation, local_ray
from treeprop_ray.benchmarks.peer import Peer, Sleepers
from treeprop_ray.benchmarks.pipeline import BASELINE, PIECES, ask_steps
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import in_turn, ratio
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import pack
from treeprop_ray.schedule.tree import one_step

N, UNIT, SAMPLES, STEPS = (
    8,
    0.008,
    8,
    4,
)  # blocks, seconds of a block, of a batch, steps of a timing
PROCESSES = 4  # as many as the tree has lines
TREE = {"lift": 1, "answer": 3, "head": 3, "backward": 2}  # units: forward, input, weights
STAGE = N // PROCESSES
CHAIN = {"ahead": STAGE, "back": 2 * STAGE}


def run(bench: BenchSettings) -> None:
    """1, 2, 4 and 8 micro-batches."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(local_ray())
        players = {
            (what, transport): stack.enter_context(Emulation(transport, PROCESSES, name=what))
            for what in ("chain", "waves")
            for transport in ("store", "stream")
        }
        for pieces in PIECES:
            rows += rows_of(players, pieces, bench.rounds)
            print(markdown(rows), flush=True)
    title = "Pipelines with a device for each process, emulated"
    print(write_table(bench.out, "bench_pipeline_span", title, rows, NOTES))


def rows_of(
    players: Mapping[tuple[str, str], Emulation], pieces: int, rounds: int
) -> list[dict[str, Any]]:
    """All candidates with a batch cut into so many pieces, timed in turn."""
    clock = itertools.count()
    tree = Tree(N)
    layout = replace(pack(tree, PROCESSES), one_machine=True)
    waves = one_step(tree, Rule(objective="node"), layout, True, pieces)
    schedules = {
        "chain": ("chain of actors", one_chain_step(PROCESSES, True, pieces), CHAIN),
        "waves": ("TreeProp waves", waves, TREE),
    }
    peer = Peer(partial(Sleepers, N, UNIT, SAMPLES), pieces, PROCESSES)
    try:
        work: dict[str, Callable[[], None]] = {
            f"torch {name}": partial(ask_steps, peer, name, STEPS, clock) for name in peer.schedules
        }
        for (what, transport), player in players.items():
            name, calls, units = schedules[what]
            player.pieces = pieces
            player.play(calls, partial(price, units, UNIT / pieces))
            work[f"{name}, {transport}"] = partial(steps_of, player)
        seconds = in_turn(work, rounds)
    finally:
        peer.close()
    return [
        {
            "micro-batches": pieces,
            "training": name,
            "ms per step": 1000 * statistics.median(seconds[name]) / STEPS,
            f"time / {BASELINE}": ratio(seconds, name, BASELINE),
        }
        for name in work
    ]


def steps_of(player: Emulation) -> None:
    """Some steps of what is played."""
    player.seconds(STEPS)


def price(units: Mapping[str, int], unit: float, call: Call) -> float:
    """Seconds of a call, whose ops run one after the other."""
    return unit * sum(units.get(op.verb, 0) for op in call.ops)


NOTES = [
    f"**Emulated**: {N} blocks (the head is one), {PROCESSES} processes that each stand for a "
    f"device. A block takes {1000 * UNIT:g} ms for the forward of a whole batch, as much for the "
    "gradient of its input and as much for that of its weights; a micro-batch takes its share. "
    "Tensors are a few bytes. `torch`: `torch.distributed.pipelining` over gloo, one stage of two "
    "blocks in a process, for zero bubble (ScheduleZBVZeroBubble) two stages of one; 1F1B wants as "
    "many micro-batches as stages. Chain of actors: the same stages (GPipe). TreeProp waves: "
    "beta = 0, objective=node, the lines of the tree on the processes; 36 units of work where "
    f"backpropagation has 24. {STEPS} steps in a timing, candidates in turn, medians, ratios round "
    "by round.",
]
