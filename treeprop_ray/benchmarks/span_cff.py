"""The part of bench span about CFF+M: a chain of layers that learn while the next ones run.

Emulated (emulated.py): a layer's forward is a sleep of t and so is its backward. A device for
every layer, four actors for all: an actor's layers run forward one after another, and when the
last of them goes back the others have already done so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from treeprop_ray.benchmarks.emulated import HOSTS, Emulation
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.schedule.cff import one_cff_step
from treeprop_ray.schedule.ops import Call

SIZES = (8, 16, 32)


def layer_calls(N: int) -> list[Call]:
    """A step of N layers (and a head that does nothing)."""
    bounds = [N * k // HOSTS for k in range(HOSTS + 1)]
    bounds[-1] += 1
    return one_cff_step([[(i, i + 1) for i in range(*ends)] for ends in itertools.pairwise(bounds)])


def layer_by_layer(t: float, call: Call) -> float:
    """A unit for every forward; one for all backwards."""
    verbs = [op.verb for op in call.ops]
    return t * (verbs.count("ahead") + ("learn" in verbs))


def rows_beside(emulation: Emulation, span: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every measured chain of up to 32 blocks."""
    rows = []
    for measured in span:
        N, t = measured["N"], measured["t (ms)"]
        if N not in SIZES:
            continue
        emulation.play(layer_calls(N), partial(layer_by_layer, t / 1000))
        emulation.seconds()  # warm up
        seconds, ideal = emulation.seconds(rounds=5), 2 * N / (N + 1)
        chain = measured["chain of few stages (ms)"]
        speed_up = chain / (1000 * seconds)
        rows.append(
            {
                "N": N,
                "t (ms)": t,
                "BP chain (ms)": chain,
                "CFF+M (ms)": 1000 * seconds,
                "speed-up": speed_up,
                "ideal": ideal,
                "reached (%)": round(100 * speed_up / ideal),
                "CFF+M, step to step (ms)": 1000 * emulation.seconds(steps=12, in_flight=HOSTS),
                "TreeProp speed-up": measured["speed-up"],
            }
        )
    return rows


def write(out: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """results/bench_span_cff.md and .csv."""
    return write_table(out, "bench_span_cff", "Span of CFF+M on emulated devices", rows, NOTES)


NOTES = [
    "**Emulated** as in bench_span.md, in the same run and on the same actors; N layers, no head. "
    "One batch needs N forwards, and a backward of the last layer: the others' backwards run "
    "beside the next forwards. The BP chain is that of few stages. Ideal 2N / (N + 1), 1.78 for "
    "N = 8, as the paper counts: a forward "
    "of the two views is one unit.",
    "",
    "`CFF+M (ms)`: one step alone. `step to step`: as many steps in flight as actors; a batch "
    "enters as soon as the first layers have updated, since nothing comes back. `TreeProp "
    "speed-up` is that of bench_span.md (the paper's counting).",
]
