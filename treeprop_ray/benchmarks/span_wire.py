"""bench span transport=both: the waves of short blocks by the object store and by stream.

Emulated as in `bench span` (emulated.py); the transports are timed in turn on actors of their own,
or one after the other where there are many. Beside them stands what the bare wire would allow.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from treeprop_ray.benchmarks import bare
from treeprop_ray.benchmarks.emulated import Emulation, local_ray
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.span import as_the_paper, times_of, tree_calls
from treeprop_ray.core.tree import Tree, ideal_span
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Call

SIZES = (8, 16, 32, 64)
TIMES = (1, 2, 5, 20)  # ms of a block
AIMED = [(2, 8), (2, 16), (5, 8), (5, 16), (5, 32), (5, 64)]  # t, N
TRANSPORTS = ("store", "stream")
TIMING = 0.5  # seconds of a timing at least; all its steps are submitted ahead
TOGETHER = 8  # actors of a transport up to which both are there at once; one takes 200 MB
TURNS = ("Transports in turn.", "One transport after the other, since so many actors fill memory.")
Times = tuple[float, float]  # seconds of a step: of the tree, of the chain


class Hops(NamedTuple):
    """Seconds of a bare hop."""

    gloo: float
    wire: float
    crowd: float  # by gloo, the slowest of as many processes as there are actors


def run(bench: BenchSettings) -> None:
    """N = 8 .. 64, t = 1, 2, 5, 20 ms, on `hosts` actors."""
    times = times_of(bench, TIMES)
    hops = hops_of(times, bench.hosts)
    names = TRANSPORTS if bench.transport == "both" else (bench.transport,)
    groups = [names] if bench.hosts <= TOGETHER else [(name,) for name in names]
    measured: dict[tuple[float, int], dict[str, Times]] = {(t, N): {} for t in times for N in SIZES}
    with local_ray():
        for group in groups:
            with contextlib.ExitStack() as stack:
                players = {n: stack.enter_context(Emulation(n, bench.hosts)) for n in group}
                for (t, N), found in measured.items():
                    found |= played(players, N, t, bench.rounds)
                    told = ", ".join(f"{n} {1000 * found[n][0]:.2f}" for n in group)
                    print(f"t = {t:g} ms, N = {N}: {told} ms", flush=True)
    rows = [row_of(found, N, t, hops[t]) for (t, N), found in measured.items()]
    name = "bench_span_stream" + ("" if bench.hosts == 4 else f"_{bench.hosts}")
    told = "; ".join(
        f"{t:g} ms: {1000 * h.gloo:.2f}, {1000 * h.wire:.2f} and {1000 * h.crowd:.2f} ms"
        for t, h in hops.items()
    )
    notes = [
        *NOTES,
        "",
        f"{bench.hosts} actors for each transport on this machine. {TURNS[len(groups) > 1]} "
        "Bare hops of four bytes between two plain processes, each of which sleeps before it "
        "sends, beyond the sleep, by gloo, by the wire of transport=stream, and by gloo while "
        f"{2 * (bench.hosts // 2)} such processes hop two by two, half of them waking up at "
        f"the same moment. {told}. Who waits long for a packet is woken up late.",
        "",
        allowed(rows, bench.hosts),
        "",
        aim(rows),
    ]
    print(write_table(bench.out, name, "Span of short blocks, by transport", rows, notes))


def allowed(rows: Sequence[Mapping[str, Any]], hosts: int) -> str:
    """What the machine allows with so many processes."""
    told = "; ".join(
        f"t = {t:g} ms: {min(of):.0f} to {max(of):.0f} %"
        for t in dict.fromkeys(r["t (ms)"] for r in rows)
        if (of := [r["all hop at once reach (%)"] for r in rows if r["t (ms)"] == t])
    )
    return (
        f"What {os.cpu_count()} cores and {hosts} processes allow: up to {hosts} actors wake up at "
        "the end of a wave, and a core wakes one after the other. If every hop were as long as a "
        f"bare one while all hop at once, these shares of the ideal would be left: {told}. On "
        "devices of their own processes would not wait for a core."
    )


def aim(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether 90 % were reached where they should be, and where store was better."""
    if not all(f"{name} (ms)" in r for r in rows for name in TRANSPORTS):
        return "One transport alone: nothing to compare it with."
    wanted = [r for r in rows if (r["t (ms)"], r["N"]) in AIMED]
    missed = [r for r in wanted if r["stream reaches (%)"] < 90]
    worse = [r for r in rows if r["stream (ms)"] > r["store (ms)"]]

    def told(some: Sequence[Mapping[str, Any]]) -> str:
        return "; ".join(f"t = {r['t (ms)']}, N = {r['N']}" for r in some) or "none"

    absent = [f"t = {t}, N = {N}" for t, N in AIMED if (t, N) not in at(rows)]
    return (
        "Aim: stream reaches 90 % at t = 2 ms for N up to 16 and at t = 5 ms for N up to 64, and "
        f"is never slower than store. Missed: {told(missed)}. Slower than store: {told(worse)}."
        + (f" Not run: {'; '.join(absent)}." if absent else "")
    )


def at(rows: Sequence[Mapping[str, Any]]) -> set[tuple[float, int]]:
    """What was measured: t and N."""
    return {(r["t (ms)"], r["N"]) for r in rows}


def hops_of(times: Sequence[float], hosts: int) -> dict[float, Hops]:
    """Bare hops after sleeps of so many ms, in plain processes that end before actors are made."""
    with contextlib.ExitStack() as stack:

        def pair(make: Any) -> bare.Pair:
            made = bare.Pair(make)
            stack.callback(made.close)
            return made

        wire, *gloo = pair(partial(bare.wire, True)), *(pair(bare.gloo) for _ in range(hosts // 2))
        return {t: Hops(paused(gloo[0], t), paused(wire, t), crowded(gloo, t)) for t in times}


def paused(pair: bare.Pair, t: float) -> float:
    """Seconds of a bare hop of four bytes after a sleep of t ms."""
    return statistics.median(pair.seconds(1, 40, t / 1000) for _ in range(5))


def crowded(pairs: Sequence[bare.Pair], t: float) -> float:
    """The last of several hops that begin at the same time, as at the end of a wave."""
    measured = []
    for _ in range(3):
        for pair in pairs:
            pair.begin(1, 20, t / 1000)
        measured.append(max(pair.end() for pair in pairs))
    return statistics.median(measured)


def far_chain(stages: int, hosts: int) -> list[Call]:
    """A backpropagation step over a chain of stages; neighbours are never in one actor."""
    return [replace(c, host=c.host % hosts) for c in one_chain_step(stages, True)]


def played(players: Mapping[str, Emulation], N: int, t: float, rounds: int) -> dict[str, Times]:
    """Seconds of a step of the tree and of the chain, by transport."""
    ideal, price = 2 * Tree(N).depth * t, partial(as_the_paper, t / 1000, 1)
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
    return {name: (statistics.median(trees[name]), chains[name]) for name in players}


def row_of(measured: Mapping[str, Times], N: int, t: float, hops: Hops) -> dict[str, Any]:
    """One line of the table."""
    depth = Tree(N).depth
    ideal = 2 * depth * t
    least, crowded = (ideal + (2 * depth - 1) * 1000 * hop for hop in (hops.gloo, hops.crowd))
    row: dict[str, Any] = {"t (ms)": t, "N": N, "ideal step (ms)": ideal, "bare hops (ms)": least}
    step = {name: 1000 * tree for name, (tree, _) in measured.items()}
    row |= {f"{name} (ms)": step[name] for name in measured}
    row["bare hops reach (%)"] = round(100 * ideal / least)
    row["all hop at once reach (%)"] = round(100 * ideal / crowded)
    row |= {f"{name} reaches (%)": round(100 * ideal / step[name]) for name in measured}
    row["ideal speed-up"] = ideal_span(N)
    row |= {f"speed-up, {name}": 1000 * chain / step[name] for name, (_, chain) in measured.items()}
    return row


NOTES = [
    "**Emulated**: a block application is a sleep of t (never less, and not longer by what an idle "
    "machine takes to wake a process up), a node's forward is one unit and its "
    "backward one, tensors are four bytes; driver, schedule, actors, packets and the order of "
    "calls are real. `ideal step`: 2 D units and nothing else; `reaches`: the ideal step over the "
    "measured one, so every hop, call and account of an actor counts against it (a chain that pays "
    "no hops is 2 N units: the speed-up over it is N / D times that share). `bare hops`: 2 D units "
    "and 2 D - 1 hops as long as a bare send and recv of gloo after a sleep of t; `all hop at "
    "once`: the same with hops that as many processes as there are actors make at the same time.",
    "",
    f"As many steps as would ideally take {TIMING:g} s are submitted ahead in a timing; medians. "
    "`speed-up`: over a chain of actors by the same transport, in which neighbours never share an "
    "actor.",
]
