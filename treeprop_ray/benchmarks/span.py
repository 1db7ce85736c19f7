"""bench span: level waves against a chain of actors, on emulated devices (emulated.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from matplotlib.figure import Figure

from treeprop_ray.benchmarks import span_cff
from treeprop_ray.benchmarks.emulated import HOSTS, Emulation, local_ray
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree, ideal_span
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import pack
from treeprop_ray.schedule.tree import one_step

TIMES = (5, 20, 50)  # ms of a block


def tree_calls(N: int, hosts: int = HOSTS) -> list[Call]:
    """A TreeProp step of N blocks."""
    tree = Tree(N)
    layout = replace(pack(tree, hosts), one_machine=True)
    # not gathered: a host stands for many devices, which wait for each other's levels
    return one_step(tree, Rule(objective="node_all_ce"), layout, True, gathered=False)


def chain_calls(stages: int) -> list[Call]:
    """A backpropagation step over a chain of stages; neighbours share an actor."""
    calls = one_chain_step(stages, True)
    return [replace(call, host=call.host * HOSTS // stages) for call in calls]


def as_the_paper(t: float, blocks: int, call: Call) -> float:
    """Blocks of t seconds: a unit for the forward of all nodes of the call, one for their backward.
    A stage of a chain has `blocks` one after the other."""
    verbs = {op.verb for op in call.ops}
    return t * (len(verbs & {"lift", "backward"}) + blocks * len(verbs & {"ahead", "back"}))


class Strict:
    """Counts every block application, with a device for each node: the right block's forward and
    backward (two units) run beside the next levels and must be done before the node's own backward.
    """

    def __init__(self, t: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.t, self.clock = t, clock
        self.due: dict[tuple[int, int], float] = {}
        self.settled: dict[tuple[int, int], float] = {}

    def __call__(self, call: Call) -> float:
        begin = now = self.clock()
        if any(op.verb == "lift" for op in call.ops):
            now += self.t
        for op in call.ops:
            node = call.piece, op.n
            if op.verb == "settle":
                self.settled[node] = now  # leaves answer before they settle
            elif op.verb in ("answer", "head"):
                self.due[node] = self.settled.pop(node, now) + 2 * self.t
        back = [(call.piece, op.n) for op in call.ops if op.verb == "backward"]
        if back:
            now = max(now, *(self.due.pop(node, now) for node in back)) + self.t
            for op in call.ops:
                self.settled.pop((call.piece, op.n), None)
        return now - begin


def tidy(t: float) -> float:
    """A time in ms as it was asked for: whole numbers as such."""
    t = round(t, 6)
    return int(t) if t == int(t) else t


def times_of(bench: BenchSettings, usual: Sequence[float]) -> list[float]:
    """The ms of a block that were asked for."""
    for t in bench.t:
        if not 0.1 <= t <= 1000:
            raise UserError(f"t={t:g}: ms of a block, from 0.1 to 1000")
    return [tidy(t) for t in dict.fromkeys(bench.t or usual)]


def run(bench: BenchSettings) -> None:
    """N = 8 .. 128, t = 5, 20, 50 ms."""
    rows = []
    times = times_of(bench, TIMES)
    shown = 20 if 20 in times else times[-1]
    with local_ray(), Emulation() as emulation:
        hop = 1000 * bare_hop()
        for t in times:
            for N in (8, 16, 32, 64, 128):
                rows.append(row_of(emulation, N, t / 1000))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
        layers = span_cff.rows_beside(emulation, rows)
    floor = [
        "",
        "A bare Ray hop (an actor's call that takes the result of another's and sleeps 20 ms) cost "
        f"{hop:.2f} ms beyond the sleep in this run. A step has 2D - 1 hops, so hops alone limit "
        "what can be reached: "
        + ", ".join(f"{100 * hop_limit(row, hop):.0f} %" for row in rows if row["t (ms)"] == shown)
        + f" for the rows with t = {shown:g} ms.",
    ]
    table = write_table(bench.out, "bench_span", "Span on emulated devices", rows, NOTES + floor)
    figure(rows, Path(bench.out) / "bench_span.png")
    print(f"{table}\nwrote bench_span.md, .csv and .png to {bench.out}")
    print(span_cff.write(bench.out, layers))


def bare_hop(hops: int = 24) -> float:
    """Seconds that Ray itself takes from one actor to the next: calls that only sleep."""

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

    def chain_of(stages: int) -> float:
        """One step: it is long and its hops are many, so it is its own average."""
        emulation.play(chain_calls(stages), partial(as_the_paper, t, N // stages))
        return emulation.seconds()

    chain, few = chain_of(N), chain_of(HOSTS)
    row: dict[str, Any] = {"N": N, "t (ms)": tidy(1000 * t), "chain (ms)": 1000 * chain}
    for short, price, ideal in (
        ("", partial(as_the_paper, t, 0), ideal_span(N)),
        (", strict", Strict(t), N / (Tree(N).depth + 1)),
    ):
        driver = emulation.play(tree_calls(N), price)
        emulation.seconds()  # warm up
        seconds = emulation.seconds(steps=2, rounds=7)
        row[f"tree (ms){short}"] = 1000 * seconds
        row[f"speed-up{short}"] = chain / seconds
        row[f"ideal{short}"] = ideal
        row[f"reached (%){short}"] = round(100 * chain / seconds / ideal)
        if not short:
            row["chain of few stages (ms)"] = 1000 * few
            row["reached (%), few stages"] = round(100 * few / seconds / ideal)
    row["calls per step"] = driver.calls_per_step
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
    fig = Figure(figsize=(10, 4))
    axes = fig.subplots(1, 2, sharey=True)
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
