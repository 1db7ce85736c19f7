"""The part of bench span about CFF+M: a chain of layers that learn while the next ones run.

Emulated as in span.py: a layer's forward is a sleep of t and so is its backward. A device for
every layer, four actors for all: an actor's layers run forward one after another, and when the
last of them goes back the others have already done so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treeprop_ray.core.rule import Piece
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.base import StepReport
from treeprop_ray.engine.driver import Driver
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.schedule.cff import one_cff_step
from treeprop_ray.schedule.ops import Call

SIZES = (8, 16, 32)


class EmulatedLayers:
    """Sleeps for the forwards of its layers, then for one backward."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(
        self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """A unit for every forward; one for all backwards."""
        time.sleep(self.seconds * sum(op.verb == "ahead" for op in call.ops))
        if any(op.verb == "learn" for op in call.ops):
            time.sleep(self.seconds)
        return {name: torch.zeros(1) for name in call.outputs}

    def report(self, step: int, norms: bool) -> StepReport:
        """Nothing to tell."""
        return StepReport()

    def apply(self, step: int, square_norms: Any) -> None:
        """Nothing to update."""


def take_up(driver: Driver, N: int, t: float) -> None:
    """Make the actors of a driver a chain of N layers (and a head that does nothing)."""
    hosts = len(driver.roles)
    bounds = [N * k // hosts for k in range(hosts + 1)]
    stages = [
        [(i, i + 1) for i in range(bounds[k], bounds[k + 1] + (k == hosts - 1))]
        for k in range(hosts)
    ]
    calls = one_cff_step(stages)
    roles = [
        Role(
            name=role.name,
            about="emulated",
            make_host=partial(EmulatedLayers, t),
            calls=tuple(c for c in calls if c.host == host),
            total=1,
            pieces=1,
            direct=False,
        )
        for host, role in enumerate(driver.roles)
    ]
    driver.become(roles, calls)


def alone(driver: Driver, runs: int = 5) -> float:
    """Seconds of one step from its submission to its end: median."""
    seconds = []
    for step in range(runs + 1):
        began = time.perf_counter()
        driver.step(step, False)
        driver.wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def in_flight(driver: Driver, steps: int = 12) -> float:
    """Seconds from step to step when as many are under way as there are actors."""
    before, driver.in_flight = driver.in_flight, len(driver.roles)
    try:
        began = time.perf_counter()
        for step in range(steps):
            driver.step(step, False)
        driver.wait()
        return (time.perf_counter() - began) / steps
    finally:
        driver.in_flight = before


def rows_beside(driver: Driver, span: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every measured chain of up to 32 blocks."""
    rows = []
    for measured in span:
        N, t = measured["N"], measured["t (ms)"]
        if N not in SIZES:
            continue
        take_up(driver, N, t / 1000)
        seconds, ideal = alone(driver), 2 * N / (N + 1)
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
                "CFF+M, step to step (ms)": 1000 * in_flight(driver),
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
