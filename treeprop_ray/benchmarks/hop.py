"""bench hop: a tensor from actor to actor, by the object store and by stream, and the bare wire.

Beside them Ray Direct Transport over gloo, which hands a tensor over by `torch.distributed` but
asks the driver for every hop, as the object store does.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
import torch
from ray.experimental.collective import create_collective_group, destroy_collective_group
from torch import Tensor

from treeprop_ray.benchmarks import bare
from treeprop_ray.benchmarks.emulated import Emulation, local_ray
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.ops import Call, Op, interleave, make_calls

SIZES = {"4 kB": 2**10, "1 MB": 2**18, "8 MB": 2**21}  # floats
HOPS, STEPS = 40, 8  # of a step, of a timing
FEW = 2  # steps of a timing of Ray Direct Transport, which takes long
BARE = {
    "bare gloo (ms)": bare.gloo,
    "wire alone (ms)": partial(bare.wire, True),
    "wire alone, TCP (ms)": partial(bare.wire, False),
}


def run(bench: BenchSettings) -> None:
    """4 kB, 1 MB, 8 MB."""
    rows = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(local_ray())
        pairs = {name: bare.Pair(make) for name, make in BARE.items()}
        for pair in pairs.values():
            stack.callback(pair.close)
        for size, floats in SIZES.items():
            rows.append(row_of(size, floats, pairs, bench.rounds))
            print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    notes = [*NOTES, "", aim(rows)]
    print(write_table(bench.out, "bench_hop", "One hop between two actors", rows, notes))


def aim(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which rows miss what a hop should cost."""
    slow = [r["tensor"] for r in rows if r["stream / bare gloo"] > 1.5]
    near = [r["tensor"] for r in rows[:1] if r["store / stream"] < 5]
    return (
        "Aim: stream takes at most 1.5 times as long as the bare wire, and at 4 kB at most a fifth "
        f"of store. Missed: {', '.join([*slow, *near]) or 'none'}."
    )


def row_of(size: str, floats: int, pairs: dict[str, bare.Pair], rounds: int) -> dict[str, Any]:
    """One line of the table: all candidates in turn, medians."""
    with (
        Emulation("store", 2, floats, "hop") as store,
        Emulation("stream", 2, floats, "hop") as stream,
        Direct(floats) as direct,
    ):
        work: dict[str, Callable[[], float]] = {}
        for name, emulation in (("store (ms)", store), ("stream (ms)", stream)):
            emulation.play(to_and_fro(), free)
            work[name] = partial(hop_of, emulation)
        work["Ray Direct Transport (ms)"] = direct.seconds
        for name, pair in pairs.items():
            work[name] = partial(pair.seconds, floats, STEPS * HOPS)
        for candidate in work.values():
            candidate()  # warm up
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(rounds):
            for name, candidate in work.items():
                seconds[name].append(candidate())
    row: dict[str, Any] = {"tensor": size}
    row |= {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    row["stream / bare gloo"] = row["stream (ms)"] / row["bare gloo (ms)"]
    for name in ("store", "Ray Direct Transport"):
        row[f"{name} / stream"] = row[f"{name} (ms)"] / row["stream (ms)"]
    return row


class Direct:
    """Two actors that hand a tensor to and fro by Ray Direct Transport; Ray must be running."""

    def __init__(self, floats: int) -> None:
        maker = ray.remote(num_cpus=0.01)(Hand)
        self.actors: list[Any] = [maker.remote(floats) for _ in range(2)]
        self.group = create_collective_group(self.actors, backend="gloo")

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *_: object) -> None:
        destroy_collective_group(self.group)
        for actor in self.actors:
            ray.kill(actor)

    def seconds(self) -> float:
        """Seconds of a hop; all of a step are submitted ahead."""
        began = time.perf_counter()
        for _ in range(FEW):
            last = self.actors[0].take.remote(None)
            for hop in range(1, HOPS):
                last = self.actors[hop % 2].take.remote(last)
            ray.get(self.actors[HOPS % 2].end.remote(last))
        return (time.perf_counter() - began) / FEW / HOPS


class Hand:
    """An actor that takes a tensor and hands on one of the same size."""

    def __init__(self, floats: int) -> None:
        torch.set_num_threads(1)
        self.tensor = torch.zeros(floats)

    def take(self, _: Tensor | None) -> Tensor:
        """What is handed on."""
        return self.tensor

    def end(self, _: Tensor) -> None:
        """The last hop."""


ray.method(tensor_transport="gloo")(Hand.take)  # marks it


def to_and_fro() -> list[Call]:
    """Calls of two hosts, each of which takes what the other has made."""
    ops = [Op("lift", k, (f"z{k}",) if k else (), (f"z{k + 1}",)) for k in range(HOPS + 1)]
    return interleave(
        [make_calls([(k, "forward", 0, {k % 2: [op]}) for k, op in enumerate(ops)], 0)], 1
    )


def free(call: Call) -> float:
    """Calls that do nothing."""
    return 0.0


def hop_of(emulation: Emulation) -> float:
    """Seconds of a hop: a step is nothing but hops, and what begins and ends it."""
    return emulation.seconds(STEPS) / HOPS


NOTES = [
    f"Two actors hand a tensor to and fro, {HOPS} times in a step, {STEPS} steps in a timing; "
    "their calls do nothing else, so a hop is all between the end of a call and the start of the "
    "next one, and the actors' own accounts. `bare gloo`: `torch.distributed` send and recv of "
    "the same tensor between two plain processes, into memory that is there already. `wire "
    "alone`: the wire of transport=stream between two such processes, with memory that both share "
    "and, as between machines, over TCP. `Ray Direct Transport`: actors' methods with "
    f'`tensor_transport="gloo"`, {HOPS} hops submitted ahead. All on one machine '
    "over loopback, timed in turn; medians.",
]
