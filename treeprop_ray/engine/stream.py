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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from treeprop_ray.core.rule import HeldOut, cut
from treeprop_ray.engine import transport
from treeprop_ray.engine.actors import HostActor, Role
from treeprop_ray.engine.direct import Direct, Rendezvous, gpu_of, partners
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.links import Address
from treeprop_ray.engine.twins import swap
from treeprop_ray.engine.wire import Wire
from treeprop_ray.errors import ActorLost, TrainingError, UserError
from treeprop_ray.hosts.base import Host, StepReport
from treeprop_ray.schedule.ops import STEP, Call
from treeprop_ray.schedule.programs import Key, programs

CHUNK = 8  # steps in one call of the driver
TRIAL = 4  # steps after which transport=auto chooses
SHORT = 0.1  # seconds of a call below which it chooses stream: a wave by store costs 2 to 6 ms more


class StreamActor(HostActor):
    """A host that runs its own program."""

    wire: Wire | None = None

    def open_door(self, token: bytes, patience: float) -> Address:
        """Where others can reach this one; connections of an earlier session are dropped."""
        self.disconnect()
        self.broken = None
        self.wire = Wire(ray.util.get_node_ip_address(), token, patience)
        return replace(self.wire.address, gpu=gpu_of(self._device))

    @property
    def _device(self) -> torch.device:
        return self.host.device if isinstance(self.host, Host) else torch.device("cpu")

    def connect(
        self, rank: int, addresses: Sequence[Address], meeting: Rendezvous | None, session: str
    ) -> None:
        """Join the others; `meeting`: where those with GPUs find each other."""
        assert self.wire is not None
        talkers = {
            host
            for program in self.role.programs.values()
            for turn in program.turns
            for host, _ in (*turn.takes, *turn.gives)
        }
        hosts = len(addresses) // self.role.copies
        first = rank - rank % hosts
        self.peers = sorted(set(range(first, first + hosts)) - {rank})
        self.twins = sorted(set(range(rank % hosts, len(addresses), hosts)) - {rank})
        talkers |= {*self.twins, *(self.peers if self.role.clip else ())}
        self.wire.join(rank, addresses, sorted(talkers))
        if meeting and addresses[rank].gpu:
            self.wire.direct = Direct(
                "nccl", rank, len(addresses), meeting, session, self.wire.patience, self._device
            )
            self.wire.direct.greet(partners(rank, addresses, sorted(talkers)))

    def disconnect(self) -> None:
        """Leave the others, who hear of it if they wait for this one."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def run_steps(self, steps: Sequence[tuple[int, bool, str]]) -> StepReport:
        """Train some steps, each with the name of its pass; the report of the last one."""
        report = StepReport()
        with self._leaving_on_error():
            for step, norms, name in steps:
                self._pass(name, step)
                report = self.report(step, norms or self.role.clip, *self._sums(step))
                squares = None
                if self.role.clip:
                    assert self.wire is not None
                    told = self.wire.exchange(report.square_norms, self.peers)
                    squares = [report.square_norms, *told]
                weights = self._apply(step, squares)
                if self.role.shards:
                    self.renew(step, *self._swap([transport.arriving(weights)] * len(self.twins)))
        return report

    def _sums(self, step: int) -> list[Any]:
        """With copies: what the others have added up, after all have handed out their terms."""
        if not self.twins:
            return []
        given = self._shared("hand_out", step, self.host.hand_out)
        others = self._swap([given[k] for k in range(self.role.copies) if k != self.role.copy])
        added = self._shared("add_up", step, self.host.add_up, others)
        return self._swap([added] * len(self.twins))

    def _swap(self, values: Sequence[Any]) -> list[Any]:
        assert self.wire is not None
        return swap(self.wire, self.twins, values)

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
        self.buffer: list[tuple[int, bool, str]] = []
        self.store: TCPStore | None = None  # where GPUs meet
        super().__init__(*words, **more)

    def actor_class(self) -> Any:
        """What an actor is made of."""
        return ray.remote(StreamActor)

    def _make(self) -> None:
        self.roles = self._with_programs(self.roles)
        super()._make()

    def _with_programs(self, roles: Sequence[Role]) -> list[Role]:
        passes = {STEP: self.calls, **self.others}
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
        if self.plan.gpus and self.store is None:
            host = ray.util.get_node_ip_address()
            self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        meeting = (self.store.host, self.store.port) if self.store else None
        session = token.hex()[:8]  # a name; the token itself stays secret
        self._get(
            [
                actor.connect.remote(rank, addresses, meeting, session)
                for rank, actor in enumerate(self.actors)
            ]
        )

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
        self.buffer.append((step, report, self.pass_at(step)))
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
        """A call has many waves, each of which may take its time. A failure of one host makes the
        others lose it: the failure is what to show."""
        try:
            return super()._get(refs, timeout or CHUNK * self.wave_timeout)
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


class AutoDriver(StreamDriver):
    """Sends the first steps wave by wave, then chooses by how long the actors' calls take."""

    def __init__(self, *words: Any, **more: Any) -> None:
        self.streams: bool | None = None  # not yet known
        self.tried = 0
        super().__init__(*words, **more)

    def _join(self) -> None:
        if self.streams:
            super()._join()

    def step(self, step: int, report: bool) -> None:
        """A step by the transport that was chosen; after a few, choose one."""
        if self.streams:
            super().step(step, report)
            return
        Driver.step(self, step, report)
        self.tried += 1
        if self.streams is None and self.tried >= TRIAL:
            self.wait()
            pace = max(self._get([actor.pace.remote() for actor in self.actors]))
            self.streams = pace < SHORT
            self._join()

    def probe(self, name: str, at: HeldOut) -> None:
        """A pass of the probe by the transport that was chosen."""
        if self.streams:
            super().probe(name, at)
        else:
            Driver.probe(self, name, at)

    @property
    def calls_per_step(self) -> int:
        """Remote calls of the driver for one step, rounded up."""
        waves = len(self.calls) + len(self.actors) * (2 if self.clip else 1)
        return super().calls_per_step if self.streams else waves


def driver_class(transport: str) -> type[Driver]:
    """The driver of a transport."""
    return {"store": Driver, "stream": StreamDriver, "auto": AutoDriver}[transport]
