"""bench span transport=both: the waves of short blocks by the object store and by stream.

Emulated as in `bench span` (emulated.py); the two transports are timed in turn on actors of their
own. Beside them stands what the bare wire would allow.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from treeprop_ray.benchmarks import bare
from treeprop_ray.benchmarks.emulated import Emulation, local_ray
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.span import as_the_paper, tree_calls
from treeprop_ray.core.tree import Tree, ideal_span
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call

SIZES = (8, 16, 32, 64)
TIMES = (1, 2, 5, 20)  # ms of a block
AIMED = [(2, 8), (2, 16), (5, 8), (5, 16), (5, 32), (5, 64)]  # t, N
TRANSPORTS = ("store", "stream")
TIMING = 0.5  # seconds of a timing at least; all its steps are submitted ahead


def run(bench: BenchSettings) -> None:
    """N = 8 .. 64, t = 1, 2, 5, 20 ms, on `hosts` actors."""
    rows = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(local_ray())
        pairs = [bare.Pair(make) for make in (bare.gloo, partial(bare.wire, True))]
        for pair in pairs:
            stack.callback(pair.close)
        hops: dict[float, tuple[float, float]] = {}
        players = {name: stack.enter_context(Emulation(name, bench.hosts)) for name in TRANSPORTS}
        for t in TIMES:
            hops[t] = gloo, _ = paused(pairs[0], t), paused(pairs[1], t)
            for N in SIZES:
                rows.append(row_of(players, N, t, gloo, bench.rounds))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    name = "bench_span_stream" + ("" if bench.hosts == 4 else f"_{bench.hosts}")
    told = "; ".join(
        f"{t:g} ms: {1000 * gloo:.2f} and {1000 * wire:.2f} ms" for t, (gloo, wire) in hops.items()
    )
    notes = [
        *NOTES,
        "",
        f"{bench.hosts} actors for each transport on this machine. Bare hops of four bytes between "
        "two plain processes, each of which sleeps before it sends, beyond the sleep, by gloo and "
        f"by the wire of transport=stream. {told}. Who waits long for a packet is woken up late.",
        "",
        aim(rows),
    ]
    print(write_table(bench.out, name, "Span of short blocks, by transport", rows, notes))


def aim(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether 90 % were reached where they should be, and where store was better."""
    wanted = [r for r in rows if (r["t (ms)"], r["N"]) in AIMED]
    missed = [r for r in wanted if r["stream reaches (%)"] < 90]
    worse = [r for r in rows if r["stream (ms)"] > r["store (ms)"]]

    def told(some: Sequence[Mapping[str, Any]]) -> str:
        return "; ".join(f"t = {r['t (ms)']}, N = {r['N']}" for r in some) or "none"

    return (
        "Aim: stream reaches 90 % at t = 2 ms for N up to 16 and at t = 5 ms for N up to 64, and "
        f"is never slower than store. Missed: {told(missed)}. Slower than store: {told(worse)}."
    )


def paused(pair: bare.Pair, t: float) -> float:
    """Seconds of a bare hop of four bytes after a sleep of t ms."""
    return statistics.median(pair.seconds(1, 40, t / 1000) for _ in range(5))


def far_chain(stages: int, hosts: int) -> list[Call]:
    """A backpropagation step over a chain of stages; neighbours are never in one actor."""
    return [replace(c, host=c.host % hosts) for c in one_chain_step(stages, True)]


def row_of(
    players: dict[str, Emulation], N: int, t: float, hop: float, rounds: int
) -> dict[str, Any]:
    """One line of the table."""
    depth, price = Tree(N).depth, partial(as_the_paper, t / 1000, 1)
    ideal = 2 * depth * t
    chains: dict[str, float] = {}
    trees: dict[str, list[float]] = {name: [] for name in players}
    for name, player in players.items():
        player.play(far_chain(N, player.hosts), price)
        chains[name] = player.seconds()
    for player in players.values():
        player.play(tree_calls(N, player.hosts), price)
        player.seconds()  # warm up
    for _ in range(rounds):
        for name, player in players.items():
            trees[name].append(player.seconds(math.ceil(1000 * TIMING / ideal)))
    least = ideal + (2 * depth - 1) * 1000 * hop
    row: dict[str, Any] = {"t (ms)": t, "N": N, "ideal step (ms)": ideal, "bare hops (ms)": least}
    step = {name: 1000 * statistics.median(values) for name, values in trees.items()}
    row |= {f"{name} (ms)": step[name] for name in players}
    row["bare hops reach (%)"] = round(100 * ideal / least)
    row |= {f"{name} reaches (%)": round(100 * ideal / step[name]) for name in players}
    row["ideal speed-up"] = ideal_span(N)
    row |= {f"speed-up, {name}": 1000 * chains[name] / step[name] for name in players}
    return row


NOTES = [
    "**Emulated**: a block application is a sleep of t (never less, and not longer by what an idle "
    "machine takes to wake a process up), a node's forward is one unit and its "
    "backward one, tensors are four bytes; driver, schedule, actors, packets and the order of "
    "calls are real. `ideal step`: 2 D units and nothing else; `reaches`: the ideal step over the "
    "measured one, so every hop, call and account of an actor counts against it (a chain that pays "
    "no hops is 2 N units: the speed-up over it is N / D times that share). `bare hops`: 2 D units "
    "and 2 D - 1 hops as long as a bare send and recv of gloo after a sleep of t.",
    "",
    f"As many steps as would ideally take {TIMING:g} s are submitted ahead in a timing, the "
    "transports in turn; medians. `speed-up`: over a chain of actors by the same transport, in "
    "which neighbours never share an actor.",
]
