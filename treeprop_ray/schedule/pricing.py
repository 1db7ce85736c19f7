"""What the calls of a step cost, on devices that need not be here. Pure Python.

`price` walks the calls in the order in which the driver submits them. A call starts when the driver
has submitted it, its actor is free and its inputs have arrived. It takes the time of its ops; what
it makes leaves over its actor's link, one packet after the other. The longest path through all this
is the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treeprop_ray.schedule.ops import Call


@dataclass(frozen=True)
class Link:
    """Between two devices."""

    name: str
    bandwidth: float  # bytes per second that arrive
    latency: float  # seconds


@dataclass(frozen=True)
class Runtime:
    """What Ray adds."""

    hop: float = 0.0  # seconds from the end of a call to the start of one that waits for it
    submit: float = 0.0  # seconds of the driver per call


# Assumptions about links between GPUs, not measurements; shared memory as `doctor` measured it on
# two cores. Ray's own times are those of results/bench_plan_check.md and results/bench_hop.md.
NVLINK = Link("NVLink", 300e9, 20e-6)
PCIE = Link("PCIe", 20e9, 50e-6)
ETHERNET = Link("Ethernet", 10e9, 100e-6)  # 100 Gbit/s
SHARED = Link("object store", 800e6, 0.0)
FREE = Runtime()
SUBMIT = 0.25e-3  # seconds of the driver per call, measured on two cores
RUNTIMES = {"store": Runtime(4.6e-3, SUBMIT), "stream": Runtime(0.5e-3, 0.0)}
RUNTIMES["auto"] = RUNTIMES["stream"]  # which it takes wherever calls are so short that hops count

Cost = Callable[[Call], float]
Bytes = Callable[[str], float]  # of a tensor that travels


@dataclass(frozen=True)
class Priced:
    """A step."""

    seconds: float  # the longer of critical path and driver
    path: float
    driver: float
    calls: int
    moved: float  # bytes that travel in the step
    wave: float  # the most that travels after one wave (phase and level)
    spans: tuple[tuple[float, float], ...] = ()  # when each call begins and ends


def price(
    calls: Sequence[Call], hosts: int, cost: Cost, size: Bytes, link: Link, ray: Runtime
) -> Priced:
    """The critical path of a step."""
    free, out = [0.0] * hosts, [0.0] * hosts  # when an actor, and its link, is free
    there: dict[tuple[int, str], float] = {}  # when a tensor has arrived at those who read it
    waves: dict[tuple[int, str, int], float] = {}
    spans = []
    for k, call in enumerate(calls):
        inputs = [there[call.piece, name] for name in call.inputs]
        arrived = max(inputs, default=0.0) + ray.hop
        start = max((k + 1) * ray.submit, free[call.host], arrived)
        end = free[call.host] = start + cost(call)
        spans.append((start, end))
        for packet in call.packets:
            load = sum(map(size, packet))
            out[call.host] = max(out[call.host], end) + load / link.bandwidth
            there.update({(call.piece, name): out[call.host] + link.latency for name in packet})
            key = (call.piece, call.phase, call.level)
            waves[key] = waves.get(key, 0.0) + load
    path, driver = max(free), ray.submit * (len(calls) + hosts)  # and one `finish` per actor
    return Priced(
        max(path, driver),
        path,
        driver,
        len(calls),
        sum(waves.values()),
        max(waves.values(), default=0),
        tuple(spans),
    )


def exchanged(
    step: Priced, copies: int, hosts: int, sums: Sequence[float], link: Link, ray: Runtime
) -> Priced:
    """A step of `copies` copies, each with its share of the batch: then each host adds up the
    gradients of its parameters (`sums`: how many each has) with its twins, float32, as a ring does.
    Nothing is taken to hide behind the backward pass."""
    if copies == 1:
        return step
    share = 2 * (copies - 1) / copies * 4
    exchange = share * max(sums) / link.bandwidth + 2 * (link.latency + ray.hop)
    driver = copies * (step.driver + 2 * ray.submit * hosts)
    path, moved = step.path + exchange, copies * (step.moved + share * sum(sums))
    return replace(step, seconds=max(path, driver), path=path, driver=driver, moved=moved)
