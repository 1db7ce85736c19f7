"""Emulated devices: a call is a sleep and tensors are a few bytes; everything else is real.

Real: driver, schedule, actors, futures, object store, order of calls. HOSTS actors stand for as
many devices as a method wants (blocks that run side by side sleep at the same time), so the
figures show what Ray and the driver add to the critical path, not what a GPU computes.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treeprop_ray.benchmarks.alarm import Alarm
from treeprop_ray.config import RaySettings
from treeprop_ray.core.rule import Piece
from treeprop_ray.engine import runtime
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.stream import driver_class
from treeprop_ray.hosts.base import Held, StepReport
from treeprop_ray.hosts.copied import Added, HandedOut
from treeprop_ray.hosts.reduction import Packet
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import Plan

HOSTS = 4
Price = Callable[[Call], float]  # seconds of a call


class EmulatedHost:
    """Sleeps for the price of a call instead of computing."""

    at, weight = "", 0

    def __init__(
        self,
        price: Price,
        sleep: Callable[[float], object] | None = None,
        floats: int = 1,
        copies: int = 1,
    ) -> None:
        self.price, self.sleep, self.copies = price, sleep or Alarm(), copies
        self.tensor = torch.zeros(floats)

    def begin(self, call: Call) -> None:
        """Nothing was left for later."""

    def run(self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Sleep, and hand on a tensor (of four bytes)."""
        seconds = self.price(call)
        if seconds > 0:
            self.sleep(seconds)
        return dict.fromkeys(call.outputs, self.tensor)

    def report(self, step: int, norms: bool) -> StepReport:
        """Nothing to tell."""
        return StepReport()

    def apply(self, step: int, square_norms: Any) -> None:
        """Nothing to update."""

    def hand_out(self) -> list[HandedOut]:
        """Nothing to add up."""
        return [(None, {}) for _ in range(self.copies)]

    def add_up(self, others: Sequence[HandedOut]) -> Added:
        """Nothing to add up."""
        return None, {}

    def take(self, others: Sequence[Added]) -> None:
        """Nothing to take."""

    def weights_out(self) -> Packet:
        """No weights."""
        return (), {}

    def renew(self, others: Sequence[Packet]) -> None:
        """No weights."""


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of our own, unless one is running."""
    owns = runtime.start(RaySettings())
    try:
        yield
    finally:
        if owns:
            runtime.stop()


class Emulation:
    """Actors that play one schedule after the other; Ray must be running."""

    def __init__(
        self,
        transport: str = "store",
        hosts: int = HOSTS,
        floats: int = 1,
        name: str = "span",
        pieces: int = 1,
    ) -> None:
        self.transport, self.hosts, self.floats, self.pieces = transport, hosts, floats, pieces
        self.name = f"{name}-{transport}"
        self.driver: Driver | None = None
        self.clock = itertools.count()

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *_: object) -> None:
        if self.driver:
            self.driver.close()

    def play(self, calls: Sequence[Call], price: Price) -> Driver:
        """Give the actors the calls of a schedule, and what each costs."""
        names = tuple(f"{self.name}/host-{h}" for h in range(self.hosts))
        roles = [
            Role(
                name=name,
                about="emulated",
                make_host=partial(EmulatedHost, price, floats=self.floats),
                calls=tuple(c for c in calls if c.host == host),
                total=self.pieces,
                pieces=self.pieces,
            )
            for host, name in enumerate(names)
        ]
        if self.driver is None:
            plan = Plan(Layout({}), names, 0.01, 0.0)
            kind = driver_class(self.transport)
            self.driver = kind(plan, roles, calls, clip=False, in_flight=2)
        else:
            self.driver.become(roles, calls)
        return self.driver

    def seconds(self, steps: int = 1, rounds: int = 1, in_flight: int = 2) -> float:
        """Seconds per step of what is played: the median of some rounds of `steps` steps that are
        submitted ahead, at most `in_flight` of them under way."""
        assert self.driver is not None
        self.driver.in_flight = in_flight
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            for step in itertools.islice(self.clock, steps):
                self.driver.step(step, False)
            self.driver.wait()
            seconds.append((time.perf_counter() - began) / steps)
        return statistics.median(seconds)
