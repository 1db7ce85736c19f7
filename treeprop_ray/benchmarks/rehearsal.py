"""A step of any method on the actors of a plan, in one process: what it computes, keeps and sends.

The hosts are those of the Ray engine (`Method.host`), their calls run in the order in
which the driver would submit them, and tensors go from host to host by hand. So bytes moved and
tensors kept are those of a real run, without the noise of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeprop_ray import config
from treeprop_ray.benchmarks.memory import Meter, resident
from treeprop_ray.benchmarks.random_data import random_images, random_job
from treeprop_ray.core.network import STEM, count_parameters, edge_name
from treeprop_ray.core.rule import cut
from treeprop_ray.engine import transport
from treeprop_ray.hosts.base import Host
from treeprop_ray.hosts.cff import CffHost
from treeprop_ray.hosts.chain import ChainHost
from treeprop_ray.methods import Job
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.ops import Call


@dataclass(frozen=True)
class Account:
    """What one step of a method costs."""

    actors: int
    trained: int  # parameters
    deployed: int
    gflop: float
    work: float  # block applications, forward and backward, on the batch
    span: float  # the longest line of them, with the actors there are
    peak: int  # bytes of the actor that needs most
    moved: int  # bytes between actors


def account(words: list[str], actors: int) -> Account:
    """Measure a step of the settings on so many actors."""
    settings = config.load([*words, "placement=packed", f"hosts={actors}", "threads=1"])
    job = random_job(settings, random_images())
    plan = job.method.plan(settings, job.tree, Cluster(((float(actors), 0.0),)))
    hosts = [job.method.host(job, plan, index) for index in range(len(plan.names))]
    calls = job.method.calls(job, plan)
    deployed = job.method.outline(settings, job.tree).deployed
    counts = {name: count_parameters(m) for host in hosts for name, m in host.parts.items()}
    step(hosts, job, calls, 0)  # optimizer state is made here
    with Meter() as meter:
        moved = step(hosts, job, calls, 1, meter)
    units = Units(job, hosts)
    return Account(
        actors=len(hosts),
        trained=sum(counts.values()),
        deployed=sum(n for name, n in counts.items() if name in deployed),
        gflop=meter.flops / 1e9,
        work=sum(units.of(call) for call in calls),
        span=units.span(calls),
        peak=max(resident(h.optimizer) + meter.peak[i] for i, h in enumerate(hosts)),
        moved=moved,
    )


def step(
    hosts: Sequence[Host], job: Job, calls: list[Call], step: int, meter: Meter | None = None
) -> int:
    """One step; returns the bytes that went from host to host."""
    pieces = cut(step, job.places, job.settings.microbatches)
    sent: dict[tuple[int, str], dict[str, Any]] = {}  # the packet of a tensor, by piece and name
    moved = 0
    charge = meter.charge if meter else contextlib.nullcontext
    for call in calls:
        with charge(call.host):
            packets = [sent[call.piece, name] for name in call.inputs]
            inputs = {name: t for packet in packets for name, t in packet.items()}
            out = hosts[call.host].run(call, pieces[call.piece], inputs)
        moved += transport.size(out)
        for names in call.packets:
            packet = {name: out[name] for name in names}
            sent.update({(call.piece, name): packet for name in names})
        del inputs, packets, out
    sent.clear()
    reports = []
    for index, host in enumerate(hosts):
        with charge(index):
            reports.append(host.report(step, norms=job.optimizer.clip > 0))
    for index, host in enumerate(hosts):
        with charge(index):
            host.apply(step, [r.square_norms for r in reports])
    return moved


class Units:
    """Counts block applications: a forward is 1, a backward is 1, on the whole batch."""

    def __init__(self, job: Job, hosts: Sequence[Host]) -> None:
        pieces = cut(0, job.places, job.settings.microbatches)
        self.shares = [len(piece.places) / job.places for piece in pieces]
        ends = {edge_name(STEM), edge_name(job.tree.head)}
        back = 2.0 if job.settings.recompute else 1.0  # a recomputed block runs again
        self.prices = [prices(host, len(host.parts.keys() - ends), back) for host in hosts]

    def of(self, call: Call) -> float:
        """Block applications of a call."""
        each = self.prices[call.host]
        return sum(each.get(op.verb, 0.0) for op in call.ops) * self.shares[call.piece]

    def span(self, calls: list[Call]) -> float:
        """When the last call ends, if a block takes one unit and sending takes none."""
        free: dict[int, float] = {}
        ready: dict[tuple[int, str], float] = {}
        for call in calls:
            begin = max([free.get(call.host, 0.0), *(ready[call.piece, n] for n in call.inputs)])
            free[call.host] = end = begin + self.of(call)
            ready.update({(call.piece, name): end for name in call.outputs})
        return max(free.values())


def prices(host: Host, blocks: int, back: float) -> dict[str, float]:
    """Block applications of an op, by its verb."""
    if isinstance(host, CffHost):  # two views in each forward and backward; the head waits
        return {"ahead": 2.0, "learn": 2.0}
    if isinstance(host, ChainHost):  # all blocks of its stage
        return {"ahead": blocks, "head": 1 + back, "back": blocks * back}
    two = dict.fromkeys(("answer", "predict", "head", "hint"), 2.0)
    return {"lift": 1.0, **two, "backward": 1.0}
