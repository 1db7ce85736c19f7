"""The hosts of a plan, copies and all, in this process: what the Ray driver does, without Ray."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from treeprop_ray.core.rule import HeldOut, cut
from treeprop_ray.engine import transport
from treeprop_ray.engine.base import Engine
from treeprop_ray.hosts.base import State, StepReport
from treeprop_ray.methods import Job
from treeprop_ray.schedule.copies import Copy, copied
from treeprop_ray.schedule.ops import STEP, Call
from treeprop_ray.schedule.placement import Cluster


def sent(value: Any) -> Any:
    """As it arrives elsewhere: in memory of its own."""
    return transport.arriving(copy.deepcopy(transport.leaving(value)))


class InProcess(Engine):
    """Calls in the order in which a driver would submit them."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        s = job.settings
        self.plan = plan = job.method.plan(s, job.tree, Cluster(((64.0, 0.0),)))
        self.H, self.R = len(plan.names), plan.copies
        self.passes = {STEP: job.method.calls(job, plan), **job.method.other_calls(job, plan)}
        self.copies = {n: copied(c, self.H, self.R, s.pieces) for n, c in self.passes.items()}
        self.hosts = []
        for i in range(len(plan.actors)):
            which = Copy(i // self.H, self.R, s.reduce == "exact", s.shard_optimizer)
            self.hosts.append(job.method.host(replace(job, copy=which), plan, i % self.H))
        self.last: list[StepReport] = []
        self.crossed = 0  # numbers of gradients (or weights) that went from copy to copy

    def _run(self, calls: Sequence[Call], at: int | HeldOut) -> None:
        pieces = cut(at, self.job.places, self.job.settings.pieces)
        held: dict[tuple[int, str], Any] = {}
        for call in calls:
            names = dict.fromkeys(id(held[call.piece, name]) for name in call.inputs)
            packets = [held[call.piece, name] for name in call.inputs]
            inputs = {k: t for p in packets if id(p) in names for k, t in sent(p).items()}
            out = self.hosts[call.host].run(call, pieces[call.piece], inputs)
            for group in call.packets:
                packet = {name: out[name] for name in group}
                held.update({(call.piece, name): packet for name in group})

    def twins(self, made: Sequence[Any]) -> list[list[Any]]:
        """For each host what its other copies have made."""
        count = len(self.hosts)
        return [
            [sent(made[j]) for j in range(i % self.H, count, self.H) if j != i]
            for i in range(count)
        ]

    def _step(self, step: int, report: bool) -> None:
        self._run(self.copies[self.job.pass_at(step)], step)
        if self.R > 1:
            given = self.twins([host.hand_out() for host in self.hosts])
            added = [
                host.add_up([packets[i // self.H] for packets in mine])
                for i, (host, mine) in enumerate(zip(self.hosts, given, strict=True))
            ]
            for host, others in zip(self.hosts, self.twins(added), strict=True):
                host.take(others)
        reports = [host.report(step, True) for host in self.hosts]
        for i, host in enumerate(self.hosts):
            first = i - i % self.H
            host.apply(step, [r.square_norms for r in reports[first : first + self.H]])
        if self.job.settings.shard_optimizer:
            weights = self.twins([host.weights_out() for host in self.hosts])
            for host, others in zip(self.hosts, weights, strict=True):
                host.renew(others)
        self.last = reports[: self.H]

    def _reports(self) -> list[StepReport]:
        return self.last

    def state(self) -> State:
        weights, optimizer = {}, {}
        for host in self.hosts:
            for whole, part in zip((weights, optimizer), host.state(), strict=True):
                assert not whole.keys() & part.keys() - {"scale/loss/value", "scale/loss/steps"}
                whole.update(part)
        return dict(sorted(weights.items())), dict(sorted(optimizer.items()))

    def load(self, state: State, step: int = 0) -> None:
        for host in self.hosts:
            host.load(*state)

    def ask(self, host: int, verb: Callable[..., Any], *words: Any, returns: int = 1) -> Any:
        return verb(self.hosts[host], *words)

    def get(self, answers: Sequence[Any]) -> list[Any]:
        return list(answers)

    def submit(self, name: str, at: HeldOut) -> None:
        self._run(self.passes[name], at)
