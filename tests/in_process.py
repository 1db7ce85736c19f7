"""The hosts of a plan, copies and all, in this process: what the Ray driver does, without Ray."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store

from treeprop_ray.core.rule import HeldOut, cut
from treeprop_ray.engine import transport
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.base import Engine
from treeprop_ray.engine.collective import Together
from treeprop_ray.engine.stream import StreamActor
from treeprop_ray.engine.wire import Wire
from treeprop_ray.errors import ActorLost
from treeprop_ray.hosts.base import Host, State, StepReport
from treeprop_ray.methods import Job
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.copies import Copy, copied
from treeprop_ray.schedule.ops import STEP, Call
from treeprop_ray.schedule.programs import programs


def sent(value: Any) -> Any:
    """As it arrives elsewhere: in memory of its own."""
    return transport.arriving(copy.deepcopy(transport.leaving(value)))


class InProcess(Engine):
    """Calls in the order in which a driver would submit them."""

    spread = True

    def __init__(self, job: Job, way_on: object = None) -> None:
        """Like `engine.build`, which it may stand for."""
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

    def take_up(self, read: Callable[[Host], None], step: int) -> None:
        for host in self.hosts:
            read(host)

    def ask(self, host: int, verb: Callable[..., Any], *words: Any, returns: int = 1) -> Any:
        return verb(self.hosts[host], *words)

    def get(self, answers: Sequence[Any]) -> list[Any]:
        return list(answers)

    def submit(self, name: str, at: HeldOut) -> None:
        self._run(self.passes[name], at)


# -- transport=stream -----------------------------------------------------------------------------


class Polite(Wire):
    """A wire whose owner lets the others work while it waits: blocks of one process have one random
    generator, so only one of them may run at a time."""

    def __init__(self, turn: threading.Lock) -> None:
        super().__init__("127.0.0.1", bytes(32), 60.0)
        self.turn = turn

    def take(self, peer: int) -> list[Tensor | None]:
        self.turn.release()
        try:
            return super().take(peer)
        finally:
            self.turn.acquire()


class PoliteGroup(Together):
    """The same for an all-reduce."""

    def __init__(self, turn: threading.Lock, rank: int, world: int, store: Store) -> None:
        super().__init__("gloo", rank, world, store, 60.0)
        self.turn = turn

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        self.turn.release()
        try:
            super().add_up(tensors)
        finally:
            self.turn.acquire()


class Streaming(InProcess):
    """Actors of transport=stream in threads, with their own programs over real wires."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        s, count = job.settings, len(self.hosts)
        by_pass = {name: programs(calls, count) for name, calls in self.copies.items()}
        self.turn = threading.Lock()
        self.crew = []
        for k, host in enumerate(self.hosts):
            role = Role(
                name=f"r/host-{k}",
                about="",
                make_host=lambda host=host: host,
                calls=(),
                total=job.places,
                pieces=s.pieces,
                programs={name: of_hosts[k] for name, of_hosts in by_pass.items()},
                clip=job.optimizer.exchanges,
                copy=k // self.H,
                copies=self.R,
                shards=s.shard_optimizer,
            )
            self.crew.append(StreamActor(role))
            self.crew[-1].wire = Polite(self.turn)
        self.threads = ThreadPoolExecutor(count)
        addresses = [actor.wire.address for actor in self.crew if actor.wire]
        meeting = HashStore()

        def join(k: int) -> None:
            self.crew[k].connect(k, addresses, None, "")
            if s.reduce == "fast":
                store = PrefixStore(str(k % self.H), meeting)
                self.hosts[k].group = PoliteGroup(self.turn, k // self.H, self.R, store)

        list(self.threads.map(join, range(count)))

    def _step(self, step: int, report: bool) -> None:
        def steps(actor: StreamActor) -> StepReport:
            with self.turn:
                return actor.run_steps([(step, report, self.job.pass_at(step))])

        futures = [self.threads.submit(steps, actor) for actor in self.crew]
        errors = [e for e in (future.exception() for future in futures) if e]
        for error in sorted(errors, key=lambda e: isinstance(e, ActorLost)):
            raise error
        self.last = [future.result() for future in futures][: self.H]

    def close(self) -> None:
        for actor in self.crew:
            actor.disconnect()
        self.threads.shutdown()
