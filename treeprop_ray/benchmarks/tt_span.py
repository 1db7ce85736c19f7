"""bench tt_span: TreeProp through time on emulated devices, against backpropagation through time.

Emulated: every call of a cell (all nodes of a depth at once) is a sleep of t, forward or backward.
Real: driver, schedule, actors, futures, the order of calls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.span import HOSTS, Emulation
from treeprop_ray.config import RaySettings
from treeprop_ray.core.rule import Piece
from treeprop_ray.engine import runtime
from treeprop_ray.engine.base import StepReport
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.time import BOUNDARY, one_time_step

UNIT = 0.01  # seconds of a cell's call


class EmulatedDepth:
    """Sleeps instead of calling a cell."""

    def __init__(self, sweeps: int, symbols: int) -> None:
        self.sweeps, self.symbols = sweeps, symbols

    def run(
        self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """Left and right application, the sweeps of depth 0, and as many backwards."""
        time.sleep(UNIT * sum(self._calls(op.verb, op.n) for op in call.ops))
        return {name: torch.zeros(1) for name in call.outputs}

    def _calls(self, verb: str, d: int) -> int:
        if self.symbols:  # backpropagation through time: one symbol after the other
            return self.symbols if verb in ("ahead", "back") else 0
        extra = self.sweeps if d == 0 else 0
        if verb == "ahead":
            return 2 + max(0, extra - 1)  # the first sweep is what depth 0 computes anyway
        return 2 + min(1, extra) if verb == "back" else 0

    def report(self, step: int, norms: bool) -> StepReport:
        """Nothing to tell."""
        return StepReport()

    def apply(self, step: int, square_norms: Any) -> None:
        """Nothing to update."""


def span_of(D: int, sweeps: int) -> int:
    """Cell calls on the longest path: every depth ahead, then depth 0 back."""
    return 2 * D + max(0, sweeps - 1) + 2 + min(1, sweeps)


def row_of(emulation: Emulation, D: int, sweeps: int) -> dict[str, Any]:
    """One line of the table."""
    calls = [
        # the depths take turns on the actors beside the boundary's; neighbours never share one
        replace(c, host=BOUNDARY if c.host == BOUNDARY else 1 + c.host % (HOSTS - 1))
        for c in one_time_step(D, 1)
    ]
    tree = emulation.seconds(calls, partial(EmulatedDepth, sweeps, 0), runs=3)
    chain_calls = one_chain_step(HOSTS, True)
    chain = emulation.seconds(chain_calls, partial(EmulatedDepth, 0, 2**D // HOSTS), runs=0)
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
    runtime.start(RaySettings())
    emulation = Emulation()
    try:
        for D in (2, 4, 6, 8):
            for sweeps in (0, 4):
                rows.append(row_of(emulation, D, sweeps))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    finally:
        if emulation.driver:
            emulation.driver.close()
        runtime.stop()
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
