"""A step of any method on the actors of a plan, in one process: what it computes, keeps and sends.

The hosts are those of the Ray engine (`engine/job.py: make_host`), their calls run in the order in
which the driver would submit them, and tensors go from host to host by hand. So bytes moved and
tensors kept are those of a real run, without the noise of one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from treeprop_ray import config
from treeprop_ray.benchmarks.memory import Meter, resident
from treeprop_ray.benchmarks.random_data import random_images, random_job
from treeprop_ray.config import Settings
from treeprop_ray.core.network import count_parameters, named
from treeprop_ray.core.rule import cut
from treeprop_ray.engine import transport
from treeprop_ray.engine.job import Job, calls_of, make_host, owners
from treeprop_ray.schedule.ops import Call, Op
from treeprop_ray.schedule.placement import Cluster, Plan, plan, stages


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
    made = plan(settings, job.tree, Cluster(((float(actors), 0.0),)), "account")
    hosts, calls = build(job, settings, made), calls_of(job, settings, made)
    deployed = {"stem", *(f"{l}-{r}" for l, r in job.tree.path_edges(job.tree.chain))}
    counts = {
        name: count_parameters(module)
        for host in hosts
        for name, module in named(host.parts).items()
    }
    step(hosts, job, calls, settings, 0)  # optimizer state is made here
    with Meter() as meter:
        moved = step(hosts, job, calls, settings, 1, meter)
    units = Units(job, settings, made)
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


def build(job: Job, settings: Settings, made: Plan) -> list[Any]:
    """The hosts of a plan."""
    owner = owners(job.tree, made, settings.method == "tree")
    return [make_host(job, settings, made, index, owner) for index in range(len(made.names))]


def step(
    hosts: list[Any],
    job: Job,
    calls: list[Call],
    settings: Settings,
    step: int,
    meter: Meter | None = None,
) -> int:
    """One step; returns the bytes that went from host to host."""
    copies = job.rule.mc_samples if settings.method == "tree" else 1
    pieces = cut(step, job.batch * copies, settings.microbatches)
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

    def __init__(self, job: Job, settings: Settings, made: Plan) -> None:
        self.job, self.method = job, settings.method
        pieces = cut(0, job.batch, settings.microbatches)
        self.shares = [len(piece.places) / job.batch for piece in pieces]
        self.back = 2.0 if settings.recompute else 1.0  # a recomputed block runs again
        self.blocks = [
            sum(edge != job.tree.head for edge in cut)
            for cut in (stages(job.tree, len(made.names)) if self.method != "tree" else [])
        ]

    def of(self, call: Call) -> float:
        """Block applications of a call."""
        return sum(self._op(op, call.host) for op in call.ops) * self.shares[call.piece]

    def _op(self, op: Op, host: int) -> float:
        if self.method == "cff":  # two views in each forward and backward; the head waits
            return 2.0 if op.verb in ("ahead", "learn") else 0.0
        if self.method == "bp":
            ahead, back = self.blocks[host], self.blocks[host] * self.back
            return {"ahead": ahead, "head": 1 + self.back, "back": back}.get(op.verb, 0.0)
        return {"lift": 1.0, "answer": 2.0, "head": 2.0, "backward": 1.0}.get(op.verb, 0.0)

    def span(self, calls: list[Call]) -> float:
        """When the last call ends, if a block takes one unit and sending takes none."""
        free: dict[int, float] = {}
        ready: dict[tuple[int, str], float] = {}
        for call in calls:
            begin = max([free.get(call.host, 0.0), *(ready[call.piece, n] for n in call.inputs)])
            free[call.host] = end = begin + self.of(call)
            ready.update({(call.piece, name): end for name in call.outputs})
        return max(free.values())
