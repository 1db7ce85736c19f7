"""bench tt_span: TreeProp through time on emulated devices, against backpropagation through time.

Emulated: every call of a cell (all nodes of a depth at once) is a sleep of t, forward or backward.
Real: driver, schedule, actors, futures, the order of calls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from treeprop_ray.benchmarks.emulated import HOSTS, Emulation, local_ray
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.time import BOUNDARY, one_time_step

UNIT = 0.01  # seconds of a cell's call


def time_calls(D: int) -> list[Call]:
    """A step of a time tree: the depths take turns on the actors beside the boundary's;
    neighbours never share one."""
    hosts = {BOUNDARY: BOUNDARY, **{d: 1 + d % (HOSTS - 1) for d in range(1, D + 1)}}
    return [replace(call, host=hosts[call.host]) for call in one_time_step(D, 1)]


def by_depth(sweeps: int, call: Call) -> float:
    """Left and right application of a depth, the sweeps of depth 0, and as many backwards."""

    def applications(verb: str, d: int) -> int:
        extra = sweeps if d == 0 else 0
        if verb == "ahead":
            return 2 + max(0, extra - 1)  # the first sweep is what depth 0 computes anyway
        return 2 + min(1, extra) if verb == "back" else 0

    return UNIT * sum(applications(op.verb, op.n) for op in call.ops)


def by_symbol(symbols: int, call: Call) -> float:
    """Backpropagation through time: one symbol after the other."""
    return UNIT * symbols * sum(op.verb in ("ahead", "back") for op in call.ops)


def span_of(D: int, sweeps: int) -> int:
    """Cell calls on the longest path: every depth ahead, then depth 0 back."""
    return 2 * D + max(0, sweeps - 1) + 2 + min(1, sweeps)


def row_of(emulation: Emulation, D: int, sweeps: int) -> dict[str, Any]:
    """One line of the table."""
    emulation.play(time_calls(D), partial(by_depth, sweeps))
    emulation.seconds()  # warm up
    tree = emulation.seconds(steps=2, rounds=3)
    emulation.play(one_chain_step(HOSTS, True), partial(by_symbol, 2**D // HOSTS))
    chain = emulation.seconds()
    ideal = 2 * 2**D / span_of(D, sweeps)
    return {
        "D": D,
        "symbols": 2**D,
        "sweeps": sweeps,
        "BPTT (ms)": 1000 * chain,
        "TreeProp-TT (ms)": 1000 * tree,
        "speed-up": chain / tree,
        "ideal": ideal,
        "reached (%)": round(100 * chain / tree / ideal),
        "work ratio": (2 * (2**D - 1) + max(sweeps - 1, min(1, sweeps)) * 2**D) / 2**D,
    }


def run(bench: BenchSettings) -> None:
    """D = 2, 4, 6, 8 with and without sweeps."""
    rows = []
    with local_ray(), Emulation() as emulation:
        for D in (2, 4, 6, 8):
            for sweeps in (0, 4):
                rows.append(row_of(emulation, D, sweeps))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    notes = [
        f"**Emulated**: a call of a cell is a sleep of {1000 * UNIT:.0f} ms, for all nodes of a "
        "depth at once, as if there were devices enough. Real: driver, schedule, actors, futures. "
        "BPTT: the symbols one after the other, forward and back, on a chain of "
        f"{HOSTS} actors. Ideal: 2 N calls over the longest path of the tree, 2 D ahead, the "
        "sweeps, and depth 0 back; the other depths go back meanwhile. Work ratio: cell "
        "applications of the tree over those of BPTT, which is what one device pays.",
    ]
    title = "Span through time on emulated devices"
    print(write_table(bench.out, "bench_tt_span", title, rows, notes))
