"""Emulated devices: a call is a sleep and tensors are a few bytes; everything else is real.

Real: driver, schedule, actors, futures, object store, order of calls. HOSTS actors stand for as
many devices as a method wants (blocks that run side by side sleep at the same time), so the
figures show what Ray and the driver add to the critical path, not what a GPU computes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treeprop_ray.config import RaySettings
from treeprop_ray.core.rule import Piece
from treeprop_ray.engine import runtime
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.driver import Driver
from treeprop_ray.hosts.base import Added, HandedOut, Held, StepReport
from treeprop_ray.hosts.reduction import Packet
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import Plan

HOSTS = 4
Price = Callable[[Call], float]  # seconds of a call


class EmulatedHost:
    """Sleeps for the price of a call instead of computing."""

    at = ""

    def __init__(
        self, price: Price, sleep: Callable[[float], object] = time.sleep, copies: int = 1
    ) -> None:
        self.price, self.sleep, self.copies = price, sleep, copies

    def run(self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Sleep, and hand on four bytes."""
        self.sleep(self.price(call))
        return {name: torch.zeros(1) for name in call.outputs}

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


class Emulation:
    """HOSTS actors that play one schedule after the other."""

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.clock = itertools.count()

    def __enter__(self) -> Emulation:
        runtime.start(RaySettings())
        return self

    def __exit__(self, *_: object) -> None:
        if self.driver:
            self.driver.close()
        runtime.stop()

    def play(self, calls: Sequence[Call], price: Price) -> Driver:
        """Give the actors the calls of a schedule, and what each costs."""
        names = tuple(f"span/host-{h}" for h in range(HOSTS))
        roles = [
            Role(
                name=name,
                about="emulated",
                make_host=partial(EmulatedHost, price),
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
