"""transport=stream: actors run their own lists of calls and hand packets to each other.

The schedule is static, so the driver need not be asked for every wave: it sends each actor one call
for several steps, and an actor's program says which packets a call takes from whom and gives to
whom. The order of sums is the schedule's, as with `store`.

    driver     run steps 0 … 7  ─────────────────────────────────────────►  reports of step 7
    host 0     open ── F4 ──── F6 FB5 ── FB7 B6 ──── B4 close, update, open ── F4 …
                  z0 └──►│ z4 └──►│          ▲ l2 r2
    host 1              F2 FB1 ── FB3 A2 B2 ─┘ update                   F2 …
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayTaskError
from torch import Tensor

from treeprop_ray.core.rule import HeldOut, cut
from treeprop_ray.engine.actors import HostActor, Role
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.links import Address
from treeprop_ray.engine.wire import Wire
from treeprop_ray.errors import ActorLost, TrainingError, UserError
from treeprop_ray.hosts.base import StepReport
from treeprop_ray.schedule.ops import Call

CHUNK = 8  # steps in one call of the driver
STEP = "tree"  # the name of a training step among the passes

Key = tuple[int, tuple[str, ...]]  # piece and names of a packet


@dataclass(frozen=True)
class Turn:
    """A call of a host: what it takes from others before, and gives to others after."""

    call: Call
    takes: tuple[tuple[int, Key], ...]  # (host, packet)
    gives: tuple[tuple[int, Key], ...]


@dataclass(frozen=True)
class Program:
    """A host's turns in one pass, and the order in which packets of each other host arrive."""

    turns: tuple[Turn, ...]
    arrivals: Mapping[int, tuple[Key, ...]]


def programs(calls: Sequence[Call], hosts: int) -> list[Program]:
    """What each host does in a pass of the schedule. A call sends each reader one packet, with the
    tensors that this one reads; it is taken by the reader's first call that needs any of them."""
    readers: dict[tuple[int, str], set[int]] = {}
    for call in calls:
        for name in (name for op in call.ops for name in op.reads):
            readers.setdefault((call.piece, name), set()).add(call.host)
    under_way: dict[tuple[int, int, str], tuple[int, Key]] = {}  # (reader, piece, name) -> packet
    turns: list[list[Turn]] = [[] for _ in range(hosts)]
    arrivals: list[dict[int, list[Key]]] = [{} for _ in range(hosts)]
    for call in calls:
        takes: list[tuple[int, Key]] = []
        for name in (name for op in call.ops for name in op.reads):
            packet = under_way.get((call.host, call.piece, name))
            if packet:
                takes.append(packet)
                for fellow in packet[1][1]:
                    del under_way[call.host, call.piece, fellow]
        by_reader: dict[int, list[str]] = {}
        for name in call.outputs:
            for reader in readers.get((call.piece, name), set()) - {call.host}:
                by_reader.setdefault(reader, []).append(name)
        gives = []
        for reader, names in sorted(by_reader.items()):
            key = (call.piece, tuple(names))
            under_way |= {(reader, call.piece, name): (call.host, key) for name in names}
            gives.append((reader, key))
            arrivals[reader].setdefault(call.host, []).append(key)
        turns[call.host].append(Turn(call, tuple(takes), tuple(gives)))
    return [
        Program(tuple(mine), {host: tuple(keys) for host, keys in here.items()})
        for mine, here in zip(turns, arrivals, strict=True)
    ]


class StreamActor(HostActor):
    """A host that runs its own program."""

    wire: Wire | None = None

    def open_door(self, token: bytes, patience: float) -> Address:
        """Where others can reach this one; connections of an earlier session are dropped."""
        self.disconnect()
        self.broken = None
        self.wire = Wire(ray.util.get_node_ip_address(), token, patience)
        return self.wire.address

    def connect(self, rank: int, addresses: Sequence[Address]) -> None:
        """Join the others."""
        assert self.wire is not None
        everyone = set(range(len(addresses))) - {rank}
        talkers = {
            host
            for program in self.role.programs.values()
            for turn in program.turns
            for host, _ in (*turn.takes, *turn.gives)
        }
        self.peers = sorted(everyone)
        self.wire.join(rank, addresses, sorted(everyone if self.role.clip else talkers))

    def disconnect(self) -> None:
        """Leave the others, who hear of it if they wait for this one."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def run_steps(self, steps: Sequence[tuple[int, bool]]) -> StepReport:
        """Train some steps; the report of the last one."""
        report = StepReport()
        with self._leaving_on_error():
            for step, norms in steps:
                self._pass(STEP, step)
                report = self.report(step, norms or self.role.clip)
                squares = None
                if self.role.clip:
                    assert self.wire is not None
                    told = self.wire.exchange(report.square_norms, self.peers)
                    squares = [report.square_norms, *told]
                self._apply(step, squares)
        return report

    def run_pass(self, name: str, at: HeldOut) -> None:
        """A pass of the probe over a held-out batch."""
        with self._leaving_on_error():
            self._pass(name, at)

    def _pass(self, name: str, at: int | HeldOut) -> None:
        wire, program = self.wire, self.role.programs[name]
        assert wire is not None
        pieces = cut(at, self.role.total, self.role.pieces)
        arrived: dict[tuple[int, Key], list[Tensor | None]] = {}
        order = {host: iter(keys) for host, keys in program.arrivals.items()}
        for turn in program.turns:
            inputs: dict[str, Tensor | None] = {}
            if turn.takes:  # what the call would begin with is done while its packets travel
                self.prepare(turn.call, at)
            for host, key in turn.takes:
                while (host, key) not in arrived:
                    arrived[host, next(order[host])] = wire.take(host)
                inputs.update(zip(key[1], arrived.pop((host, key)), strict=True))
            out = self.work(turn.call, pieces[turn.call.piece], at, inputs)
            for host, key in turn.gives:
                wire.send(host, [out[name] for name in key[1]])

    @contextlib.contextmanager
    def _leaving_on_error(self) -> Any:
        """Who cannot go on leaves, so that nobody waits for it."""
        if self.broken:
            raise self.broken
        try:
            yield
        except BaseException:
            self.disconnect()
            raise


class StreamDriver(Driver):
    """Sends actors several steps in one call."""

    def __init__(self, *words: Any, **more: Any) -> None:
        self.buffer: list[tuple[int, bool]] = []
        super().__init__(*words, **more)

    def actor_class(self) -> Any:
        """What an actor is made of."""
        return ray.remote(StreamActor)

    def _make(self) -> None:
        self.roles = self._with_programs(self.roles)
        super()._make()

    def _with_programs(self, roles: Sequence[Role]) -> list[Role]:
        passes = {STEP: self.calls, **self.probes}
        by_pass = {name: programs(calls, len(roles)) for name, calls in passes.items()}
        return [
            replace(role, programs={n: p[k] for n, p in by_pass.items()}, clip=self.clip)
            for k, role in enumerate(roles)
        ]

    def become(self, roles: Sequence[Role], calls: Sequence[Call]) -> None:
        """Give the same actors other roles."""
        self.calls = calls
        super().become(self._with_programs(roles), calls)
        self._join()

    def _join(self) -> None:
        token = secrets.token_bytes(32)
        doors = [actor.open_door.remote(token, self.wave_timeout) for actor in self.actors]
        addresses = self._get(doors)
        self._get([a.connect.remote(k, addresses) for k, a in enumerate(self.actors)])

    def lost(self) -> list[int]:
        """The hosts whose actors are dead or do not answer."""
        self.buffer.clear()
        return super().lost()

    def revive(self, lost: Sequence[int]) -> None:
        """Make lost actors anew in their places, and all connections."""
        super().revive(lost)
        self._join()

    @property
    def calls_per_step(self) -> int:
        """Remote calls of the driver for one step, rounded up."""
        return -(-len(self.actors) // CHUNK)

    def step(self, step: int, report: bool) -> None:
        """Put a step into the next call; wait for earlier ones if too many are under way."""
        self.buffer.append((step, report))
        if report or len(self.buffer) == CHUNK:
            self.flush()

    def flush(self) -> None:
        """Send the steps that are waiting."""
        if self.buffer:
            steps, self.buffer = self.buffer, []
            self.flight.append([actor.run_steps.remote(steps) for actor in self.actors])
            while len(self.flight) > self.in_flight:
                self._land()

    def probe(self, name: str, at: HeldOut) -> None:
        """Run the calls of the step or of a pass of the probe; waits for them."""
        self.flush()
        self._get([actor.run_pass.remote(name, at) for actor in self.actors])

    def _get(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """A failure of one host makes the others lose it: the failure is what to show."""
        try:
            return super()._get(refs, timeout)
        except ActorLost as lost:
            raise self._failure(refs) or lost from lost

    def _failure(self, refs: list[Any]) -> Exception | None:
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=5)
        for ref in ready:
            try:
                ray.get(ref)
            except RayTaskError as e:
                cause = e.cause
                if isinstance(cause, TrainingError | UserError) and not isinstance(
                    cause, ActorLost
                ):
                    return cause
            except Exception:  # a dead actor: a loss, not a failure
                continue
        return None


def driver_class(transport: str) -> type[Driver]:
    """The driver of a transport."""
    return StreamDriver if transport == "stream" else Driver
