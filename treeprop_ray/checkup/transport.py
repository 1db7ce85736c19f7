"""How fast tensors travel from node to node. No torch here: an `Echo` starts in half a second."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from treeprop_ray.checkup import FAIL, Finding, judge, size
from treeprop_ray.errors import first_line

LATE = 0.01  # seconds of a call that is slow
THIN = 100e6  # bytes per second that are few
MB_SENT = 32
MOST_PAIRS = 36  # of nodes; beyond that only pairs with the first node are measured


class Echo:
    """An actor that talks to another one."""

    def echo(self, x: Any = None) -> int:
        """Read a byte of every page, so that the data has really arrived."""
        return 0 if x is None else int(x[::4096].sum())

    def latency(self, other: Any, calls: int = 30) -> float:
        """Median seconds of a call without data."""
        return statistics.median(_timed(lambda: ray.get(other.echo.remote()), calls))

    def bandwidth(self, other: Any, megabytes: int = MB_SENT) -> float:
        """Bytes per second from here to the other one through the object store."""
        data = np.ones(megabytes * 1_000_000, dtype=np.uint8)
        seconds = _timed(lambda: ray.get(other.echo.remote(ray.put(data))), 4)
        return data.nbytes / statistics.median(seconds[1:])


def _timed(work: Callable[[], object], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Pairs of nodes to measure: each with itself and with the others, if they are not too many."""
    pairs = list(itertools.combinations_with_replacement(range(count), 2))
    return pairs if len(pairs) <= MOST_PAIRS else [(0, k) for k in range(count)]


def measure(patience: float) -> dict[str, tuple[float, float]]:
    """(seconds of a call, bytes per second) for pairs of nodes, by their addresses."""
    nodes = [n for n in ray.nodes() if n["Alive"]]
    make = ray.remote(num_cpus=0)(Echo)
    where = [NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in nodes]
    echoes = [[make.options(scheduling_strategy=w).remote() for _ in range(2)] for w in where]
    out = {}
    try:
        for i, j in pairs_of(len(nodes)):
            here, there = echoes[i][0], echoes[j][1]
            name = f"{nodes[i]['NodeManagerAddress']} to " + (
                "itself" if i == j else nodes[j]["NodeManagerAddress"]
            )
            ray.get([here.echo.remote(), there.echo.remote()], timeout=patience)
            asked = [here.latency.remote(there), here.bandwidth.remote(there)]
            out[name] = tuple(ray.get(asked, timeout=patience))
    finally:
        for actor in itertools.chain(*echoes):
            ray.kill(actor)
    return out


def examine(patience: float = 60.0) -> list[Finding]:
    """Measure all pairs; an actor that does not answer is a failure."""
    try:
        return judge_pairs(measure(patience))
    except RayError as e:
        remedy = (
            "`ray status` and the logs of the node: can it start an actor, can the others reach it?"
        )
        return [Finding("transport", FAIL, first_line(e), remedy)]


def judge_pairs(measured: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """A line for each pair of nodes."""
    return [
        judge(
            "transport",
            f"{pair}: call {1000 * seconds:.2f} ms, {size(rate)}/s",
            fail=False,
            warn=seconds > LATE or rate < THIN,
            remedy="nodes of one zone and a placement group, or a busy machine; "
            "larger blocks and batches make up for slow calls",
        )
        for pair, (seconds, rate) in measured.items()
    ]
