"""bench replicas: copies of a tree beside pipelines and data parallelism, on emulated devices."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from treeprop_ray.benchmarks.crowd import (
    SAMPLES,
    Crowd,
    T,
    Way,
    data_parallel,
    some_pipelines,
    trees,
)
from treeprop_ray.benchmarks.emulated import local_ray
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import ratio
from treeprop_ray.reporting.tables import markdown, write_table

ACTORS = 8  # processes that stand for the devices, or one for each copy
CASES = {8: (4, 8, 16, 64), 32: (8, 16, 32, 64)}  # N: devices
STEPS, ROUNDS = 8, 3
TREES = "trees, stream"


def run(bench: BenchSettings) -> None:
    """N = 8 and 32 on 4 to 64 emulated devices."""
    cases = [(N, devices) for N, counts in CASES.items() for devices in counts]
    crowded = sorted(cases, key=lambda case: actors_of(*case))  # as many actors one after the other
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    with local_ray():
        for actors, group in itertools.groupby(crowded, key=lambda case: actors_of(*case)):
            with Crowd(actors) as crowd:
                for case in group:
                    found[case] = rows_of(crowd, *case)
                    print(markdown(found[case]), flush=True)
    rows = [row for case in cases for row in found[case]]
    name, title = "bench_replicas", "Trees times replicas on emulated devices"
    print(write_table(bench.out, name, title, rows, [*NOTES, "", aim(rows)]))


def actors_of(N: int, devices: int) -> int:
    """As many for every way of a case: up to four for a copy of the tree."""
    copies = max(1, 2 * devices // N)
    return copies * max(1, min(4, ACTORS // copies))


def rows_of(crowd: Crowd, N: int, devices: int) -> list[dict[str, Any]]:
    """All ways with the same devices and samples, timed in turn by the same actors."""
    actors, samples = crowd.actors, SAMPLES * max(1, 2 * devices // N)
    tree = trees(N, devices, actors)
    played: dict[str, tuple[Way, str, bool]] = {
        TREES: (tree, "stream", True),
        "trees, store": (tree, "store", True),
        "trees, stream, no sums": (tree, "stream", False),
    }
    for way in some_pipelines(N, devices, actors, samples):
        played[f"1F1B, {way.pieces} micro-batches"] = way, "stream", True
    played["data-parallel"] = data_parallel(N, devices, actors, samples), "stream", True
    measured: dict[str, list[float]] = {name: [] for name in played}
    for _ in range(ROUNDS):
        for name, words in played.items():
            crowd.play(*words)
            measured[name].append(crowd.seconds(STEPS))
    rows = []
    for name, (way, *_) in played.items():
        seconds, ideal = statistics.median(measured[name]), way.seconds()
        rows.append(
            {
                "N": N,
                "devices": devices,
                "samples per step": samples,
                "training": name,
                "copies x devices": way.shape,
                "ms per step": 1000 * seconds,
                "samples/s": samples / seconds,
                "ideal (samples/s)": samples / ideal,
                "of the ideal (%)": round(100 * ideal / seconds),
                f"time / {TREES}": ratio(measured, name, TREES),
            }
        )
    return rows


def aim(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where trees times replicas do not come near enough to the ideal."""
    told = []
    for name in (TREES, "trees, store"):
        those = [r for r in rows if r["training"] == name and r["of the ideal (%)"] < 90]
        missed = ", ".join(f"N = {r['N']} on {r['devices']}" for r in those)
        told.append(f"{name}: {missed or 'none'}")
    return f"Aim: at least 90 % of the ideal. Missed by {'; '.join(told)}."


NOTES = [
    f"**Emulated**: a block is a sleep of {1000 * T:.0f} ms for the forward of {SAMPLES} samples "
    "and one for their backward; fewer samples take their share of it. Gradients have no bytes. "
    "Real: driver, schedule, wires, messages by which copies add up. All ways of a case have the "
    "same devices and the same samples in a step; the same actors take them up in turn, "
    f"{ROUNDS} times {STEPS} steps that are submitted ahead (medians; ratios round by round). "
    f"{ACTORS} actors at most, or one for each copy of the tree, stand for the devices: what "
    "devices of one actor do at the same time it sleeps at the same time. All actors wake up on "
    "two cores, so what a message costs grows with their number here; on machines of their own it "
    "would not.",
    "",
    f"Trees: a copy on N / 2 devices with {SAMPLES} samples; N = 32 on 8 devices is one tree whose "
    "nodes share devices. They count as the paper does, a unit for a node's forward and one for "
    "its backward: the work of right blocks, beside the next levels, is left out (bench_span.md "
    "counts it). `no sums`: the same trees, each for itself, on the same actors: the distance from "
    "there is what adding up costs. 1F1B: chains of at most N stages side by side, one forward one "
    "backward, with as many micro-batches as the cost model finds fastest at 0.5 ms for a hop, and "
    "with a quarter of them. A stage works for a few milliseconds only before it sends, so what is "
    "missing to the ideal of 1F1B is hops on two cores; on machines of their own it would be less. "
    "Data-parallel: backpropagation, the whole chain on every device; actors add up, devices of "
    "one actor need not. By stream where nothing else is said.",
    "",
    "Ideal: the cost model's step of the same calls with sleeps alone: 2 D t for trees, "
    "2 (stages + micro-batches - 1) ticks for pipelines, 2 N t over the devices for data "
    "parallelism, which has no waits at all, if the network and its optimizer fit on every device.",
]
