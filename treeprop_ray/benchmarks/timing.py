"""How benchmarks time: candidates in turn, compared round by round."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from treeprop_ray.engine.base import Engine


def in_turn(candidates: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every candidate, `rounds` times, always one after the other.

    Timings on a shared machine drift by a factor of two; candidates that are timed in turn drift
    together, so compare them round by round (`ratio`).
    """
    for work in candidates.values():
        work()  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, work in candidates.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def steps_of(engine: Engine, count: int, clock: Iterator[int]) -> Callable[[], None]:
    """The next `count` training steps as one piece of work."""

    def work() -> None:
        for step in itertools.islice(clock, count):
            engine.step(step, report=False)
        engine.reports()

    return work


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> float:
    """Median over the rounds of time(name) / time(base)."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))
