"""bench span: level waves against a chain of actors, on emulated devices.

Emulated: a block application is a sleep of t and tensors are a few bytes. Real: driver, schedule,
placement, actors, futures, object store, order of calls. Four host actors stand for as many
devices as the tree wants (nodes of one level in one host sleep at the same time), so the figures
show what Ray and the driver add to the critical path, not what a GPU computes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeprop_ray.benchmarks import span_cff
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.config import RaySettings
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Tree, ideal_span
from treeprop_ray.engine import runtime
from treeprop_ray.engine.actors import HostLike, Role
from treeprop_ray.engine.base import StepReport
from treeprop_ray.engine.driver import Driver
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import Plan, pack
from treeprop_ray.schedule.tree import one_step

HOSTS = 4


class EmulatedHost:
    """Sleeps instead of computing.

    `paper` counts as the paper does: a node's forward is one unit and its backward is one unit.
    `strict` counts every block application, with a device for each node: the right block's
    forward and backward (two units) run beside the next levels and must be done before the
    node's own backward.
    """

    def __init__(self, seconds: float, counting: str, blocks: int) -> None:
        self.seconds, self.strict, self.blocks = seconds, counting == "strict", blocks
        self.due: dict[tuple[int, int], float] = {}
        self.settled: dict[tuple[int, int], float] = {}

    def run(
        self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """One unit for the forward of all nodes of the call, one for their backward."""
        verbs = {op.verb for op in call.ops}
        if "ahead" in verbs:  # a chain stage: its blocks one after the other
            time.sleep(self.seconds * self.blocks)
        if "lift" in verbs:
            time.sleep(self.seconds)
        now = time.perf_counter()
        for op in call.ops:
            if op.verb == "settle":
                self.settled[piece.index, op.n] = now  # leaves answer before they settle
            elif op.verb in ("answer", "head") and self.strict:
                since = self.settled.pop((piece.index, op.n), now)
                self.due[piece.index, op.n] = since + 2 * self.seconds
        if "back" in verbs:
            time.sleep(self.seconds * self.blocks)
        if "backward" in verbs:
            waits = [
                self.due.pop((piece.index, op.n), 0.0) for op in call.ops if op.verb == "backward"
            ]
            time.sleep(max(0.0, max(waits) - time.perf_counter()) + self.seconds)
            for op in call.ops:
                self.settled.pop((piece.index, op.n), None)
        return {name: torch.zeros(1) for name in call.outputs}

    def report(self, step: int, norms: bool) -> StepReport:
        """Nothing to tell."""
        return StepReport()

    def apply(self, step: int, square_norms: Any) -> None:
        """Nothing to update."""


class Emulation:
    """HOSTS actors whose roles change from one measurement to the next."""

    def __init__(self) -> None:
        self.driver: Driver | None = None

    def seconds(self, calls: Sequence[Call], make_host: Callable[[], HostLike], runs: int) -> float:
        """Seconds per step: median of some runs of two steps, submitted ahead; `runs` 0: one
        step alone (a chain's step is long and its hops are many: it is its own average)."""
        names = tuple(f"span/host-{h}" for h in range(HOSTS))
        roles = [
            Role(
                name=name,
                about="emulated",
                make_host=make_host,
                calls=tuple(c for c in calls if c.host == host),
                total=1,
                pieces=1,
                direct=False,
            )
            for host, name in enumerate(names)
        ]
        if self.driver is None:
            plan = Plan(Layout({}), names, 0.01, 0.0)
            self.driver = Driver(plan, roles, calls, clip=False, in_flight=2, transport="store")
        else:
            self.driver.become(roles, calls)
        began = time.perf_counter()
        self.driver.step(0, False)
        self.driver.wait()
        seconds = [] if runs else [time.perf_counter() - began]
        for step in range(1, 2 * runs, 2):
            began = time.perf_counter()
            self.driver.step(step, False)
            self.driver.step(step + 1, False)
            self.driver.wait()
            seconds.append((time.perf_counter() - began) / 2)
        return statistics.median(seconds)

    def tree(self, N: int, t: float, counting: str) -> float:
        """A TreeProp step with N blocks of t seconds."""
        tree = Tree(N)
        calls = one_step(
            tree,
            Rule(objective="node_all_ce"),
            replace(pack(tree, HOSTS), one_machine=True),
            True,
            gathered=False,  # a host stands for many devices, which wait for each other's levels
        )
        return self.seconds(calls, partial(EmulatedHost, t, counting, 0), runs=7)

    def chain(self, N: int, t: float, stages: int) -> float:
        """A backpropagation step over a chain of stages; neighbours share an actor."""
        calls = [
            replace(call, host=call.host * HOSTS // stages) for call in one_chain_step(stages, True)
        ]
        return self.seconds(calls, partial(EmulatedHost, t, "paper", N // stages), runs=0)


def run(bench: BenchSettings) -> None:
    """N = 8 .. 128, t = 5, 20, 50 ms."""
    rows = []
    runtime.start(RaySettings())
    emulation = Emulation()
    try:
        hop = 1000 * bare_hop()
        for t in (0.005, 0.02, 0.05):
            for N in (8, 16, 32, 64, 128):
                rows.append(row_of(emulation, N, t))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
        assert emulation.driver is not None
        layers = span_cff.rows_beside(emulation.driver, rows)
    finally:
        if emulation.driver:
            emulation.driver.close()
        runtime.stop()
    floor = [
        "",
        "A bare Ray hop (an actor's call that takes the result of another's and sleeps 20 ms) cost "
        f"{hop:.2f} ms beyond the sleep in this run. A step has 2D - 1 hops, so hops alone limit "
        "what can be reached: "
        + ", ".join(f"{100 * hop_limit(row, hop):.0f} %" for row in rows if row["t (ms)"] == 20)
        + " for the rows with t = 20 ms.",
    ]
    table = write_table(bench.out, "bench_span", "Span on emulated devices", rows, NOTES + floor)
    figure(rows, Path(bench.out) / "bench_span.png")
    print(f"{table}\nwrote bench_span.md, .csv and .png to {bench.out}")
    print(span_cff.write(bench.out, layers))


def bare_hop(hops: int = 24) -> float:
    """Seconds that Ray itself takes from one actor to the next: calls that only sleep."""
    import ray

    @ray.remote(num_cpus=0)
    class Bare:
        def sleep(self, *_: object) -> None:
            time.sleep(0.02)

    actors = [Bare.remote() for _ in range(HOSTS)]  # type: ignore[attr-defined]
    ray.get([a.sleep.remote() for a in actors])
    measured = []
    for _ in range(5):
        began = time.perf_counter()
        last = None
        for i in range(hops):
            last = actors[i % HOSTS].sleep.remote(last)
        ray.get(last)
        measured.append((time.perf_counter() - began) / hops - 0.02)
    return statistics.median(measured)


def row_of(emulation: Emulation, N: int, t: float) -> dict[str, Any]:
    """One line of the table."""
    chain, few = emulation.chain(N, t, N), emulation.chain(N, t, HOSTS)
    row: dict[str, Any] = {"N": N, "t (ms)": round(1000 * t), "chain (ms)": 1000 * chain}
    for short, counting, ideal in (
        ("", "paper", ideal_span(N)),
        (", strict", "strict", N / (Tree(N).depth + 1)),
    ):
        seconds = emulation.tree(N, t, counting)
        row[f"tree (ms){short}"] = 1000 * seconds
        row[f"speed-up{short}"] = chain / seconds
        row[f"ideal{short}"] = ideal
        row[f"reached (%){short}"] = round(100 * chain / seconds / ideal)
        if counting == "paper":
            row["chain of few stages (ms)"] = 1000 * few
            row["reached (%), few stages"] = round(100 * few / seconds / ideal)
    assert emulation.driver is not None
    row["calls per step"] = emulation.driver.calls_per_step
    return row


def hop_limit(row: Mapping[str, Any], hop: float) -> float:
    """Share of the ideal that is left when every hop of a step costs `hop` ms."""
    depth = Tree(row["N"]).depth
    units = 2 * depth * row["t (ms)"]
    return float(units / (units + (2 * depth - 1) * hop))


NOTES = [
    "**Emulated**: a block application is a sleep of t; tensors are four bytes. Real: driver, "
    f"schedule, placement on {HOSTS} host actors, futures, the order of calls. Nodes of one "
    "level in one host sleep at the same time, as on N / 2 devices.",
    "",
    "`speed-up` counts as the paper does: a node's forward is one unit, its backward one unit; "
    "ideal N / D. `strict` counts every block application, with a device for each node and "
    "beta = 0: the right block's forward and backward run beside the next levels (two more "
    "units at the finest level); ideal N / (D + 1).",
    "",
    "Chain: backpropagation over the same actors, 2 N units, a device for each block as the tree "
    "has a device for each node, so both pay a hop between devices. `few stages` compares with a "
    f"chain of {HOSTS} stages instead, N / {HOSTS} blocks in one call, which pays almost no hops: "
    "there every hop of the tree counts against it.",
]


def figure(rows: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Measured speed-up over N for each t, beside the ideal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for ax, short, title in zip(
        axes, ("", ", strict"), ("paper's counting", "strict"), strict=True
    ):
        sizes = sorted({row["N"] for row in rows})
        for t in sorted({row["t (ms)"] for row in rows}):
            mine = [row[f"speed-up{short}"] for row in rows if row["t (ms)"] == t]
            ax.plot(sizes, mine, marker="o", label=f"t = {t} ms")
        first = [row for row in rows if row["t (ms)"] == rows[0]["t (ms)"]]
        ax.plot(sizes, [row[f"ideal{short}"] for row in first], "k--", label="ideal")
        ax.set(xscale="log", xlabel="blocks N", title=title)
        ax.set_xticks(sizes, [str(n) for n in sizes])
        ax.grid(alpha=0.3)
        ax.legend()
    axes[0].set_ylabel("step time: chain of actors / TreeProp waves")
    fig.suptitle("Emulated devices: a block application is a sleep of t")
    fig.tight_layout()
    fig.savefig(target, dpi=120)
    plt.close(fig)
