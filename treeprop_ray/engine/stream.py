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
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayTaskError
from torch import Tensor

from treeprop_ray.core import devices
from treeprop_ray.core.rule import HeldOut, cut
from treeprop_ray.engine import transport
from treeprop_ray.engine.actors import HostActor, Role
from treeprop_ray.engine.direct import Direct, Rendezvous, partners
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.links import Address
from treeprop_ray.engine.twins import LITTLE, Ring
from treeprop_ray.engine.wire import Wire
from treeprop_ray.errors import ActorLost, TrainingError, UserError, told_at
from treeprop_ray.hosts.base import Host, StepReport
from treeprop_ray.schedule.ops import STEP
from treeprop_ray.schedule.programs import Key, programs

CHUNK = 8  # steps in one call of the driver at first; more if they are short
BRIEF = 0.25  # seconds: calls that take less get more steps, since actors idle from call to call
TRIAL = 4  # steps after which transport=auto chooses
SHORT = 0.1  # seconds of a call below which it chooses stream: a wave by store costs 2 to 6 ms more


class StreamActor(HostActor):
    """A host that runs its own program."""

    wire: Wire | None = None
    ring: Ring | None = None  # with copies

    def open_door(self, token: bytes, patience: float) -> Address:
        """Where others can reach this one; connections of an earlier session are dropped."""
        self.disconnect()
        self.broken = None
        self.wire = Wire(ray.util.get_node_ip_address(), token, patience)
        return replace(self.wire.address, gpu=self.gpu())

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
        copies = range(rank % hosts, len(addresses), hosts)
        if len(copies) > 1:
            self.ring = Ring(self.wire, copies, rank // hosts, self.host.weight <= LITTLE)
        talkers |= {*copies, *(self.peers if self.role.clip else ())} - {rank}
        self.wire.join(rank, addresses, sorted(talkers))
        if meeting and addresses[rank].gpu:
            self.wire.direct = Direct(
                devices.gpus.backend,
                rank,
                len(addresses),
                meeting,
                session,
                self.wire.patience,
                self.device,
            )
            self.wire.direct.greet(partners(rank, addresses, sorted(talkers)))

    def disconnect(self) -> None:
        """Leave the others, who hear of it if they wait for this one."""
        if self.wire is not None:
            self.wire.close()
            self.wire = self.ring = None

    def run_steps(self, steps: Sequence[tuple[int, bool, str]]) -> StepReport:
        """Train some steps, each with the name of its pass; the report of the last one."""
        report = StepReport()
        with self._leaving_on_error():
            for k, (step, norms, name) in enumerate(steps):
                self._pass(name, step)
                report = self.report(step, norms or self.role.clip, *self._sums(step))
                squares = None
                if self.role.clip:
                    assert self.wire is not None
                    # the next batch is read meanwhile, but none that comes after this call: where
                    # data stand is part of a host's state
                    more = partial(self._fetch, steps[k + 1][0]) if k + 1 < len(steps) else None
                    told = self.wire.exchange(report.square_norms, self.peers, more)
                    squares = [report.square_norms, *told]
                updated = self._apply(step, squares)
                if self.role.shards:
                    assert self.ring is not None
                    weights, slots = map(transport.arriving, updated)
                    kept = self.ring.hand_on(slots) if self.role.versions else None
                    self.renew(step, kept, *self.ring.tell(weights))
        return report

    def _fetch(self, step: int) -> None:
        """Read the batch of a step to come."""
        begin = time.time()
        if isinstance(self.host, Host):
            try:
                self.host.fetch(cut(step, self.role.total, self.role.pieces)[0])
            except Exception as e:
                self.broken = told_at(f"actor {self.role.name}, step {step}", e)
                raise self.broken from e
        self.busy += time.time() - begin

    def _sums(self, step: int) -> list[Any]:
        """With copies: what the others have added up, after all have handed out their terms."""
        if self.ring is None:
            return []
        given = self._shared("hand_out", step, self.host.hand_out)
        others = self.ring.deal(given)
        return self.ring.tell(self._shared("add_up", step, self.host.add_up, others))

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
            out, begin, end = self.work(turn.call, pieces[turn.call.piece], at, inputs)
            for host, key in turn.gives:
                wire.send(host, [out[name] for name in key[1]])
            self.account(turn.call, at, out, begin, end)

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

    actor_class = StreamActor

    def __init__(self, *words: Any, **more: Any) -> None:
        self.buffer: list[tuple[int, bool, str]] = []
        self.chunk = CHUNK
        super().__init__(*words, **more)
        self.chunk = min(CHUNK, self.most)

    def _completed(self, roles: Sequence[Role]) -> list[Role]:
        passes = {STEP: self.calls, **self.others}
        by_pass = {name: programs(calls, len(roles)) for name, calls in passes.items()}
        return [
            replace(role, programs={n: p[k] for n, p in by_pass.items()}, clip=self.clip)
            for k, role in enumerate(roles)
        ]

    def _join(self) -> None:
        token = secrets.token_bytes(32)
        doors = [actor.open_door.remote(token, self.wave_timeout) for actor in self.actors]
        addresses = self._get(doors)
        meeting = self._meeting() if self.plan.gpus else None
        session = token.hex()[:8]  # a name; the token itself stays secret
        self._get(
            [
                actor.connect.remote(rank, addresses, meeting, session)
                for rank, actor in enumerate(self.actors)
            ]
        )
        super()._join()

    def lost(self) -> list[int]:
        """The hosts whose actors are dead or do not answer."""
        self.buffer.clear()
        return super().lost()

    @property
    def calls_per_step(self) -> int:
        """Remote calls of the driver for one step, rounded up."""
        return -(-len(self.actors) // self.chunk)

    def step(self, step: int, report: bool) -> None:
        """Put a step into the next call; wait for earlier ones if too many are under way."""
        self.buffer.append((step, report, self.pass_at(step)))
        if report or len(self.buffer) >= self.chunk:
            self.flush()

    def flush(self) -> None:
        """Send the steps that are waiting."""
        if self.buffer:
            steps, self.buffer = self.buffer, []
            self.flight.append([actor.run_steps.remote(steps) for actor in self.actors])
            waits, began = len(self.flight) > self.in_flight, time.monotonic()
            while len(self.flight) > self.in_flight:
                self._land()
            if waits and len(steps) == self.chunk and time.monotonic() - began < BRIEF:
                self.chunk = min(2 * self.chunk, self.most)

    def _land(self) -> None:
        """The oldest call; what goes wrong in a later one meanwhile is heard at once, since an
        actor that waits for nobody may be busy with the oldest for many steps."""
        oldest, *others = self.flight
        waiting, later = list(oldest), [ref for refs in others for ref in refs]
        while waiting and later:
            seconds = self.chunk * self.wave_timeout
            ready, _ = ray.wait([*waiting, *later], timeout=seconds)
            if not ready:
                self._get(oldest, timeout=1)  # tells who is late
            if any(map(failed, ready)):
                self._get([*waiting, *later])  # tells what went wrong
            waiting = [ref for ref in waiting if ref not in ready]
            later = [ref for ref in later if ref not in ready]
        super()._land()

    def probe(self, name: str, at: HeldOut) -> None:
        """Run the calls of the step or of a pass of the probe; waits for them."""
        self.flush()
        self._get([actor.run_pass.remote(name, at) for actor in self.actors])

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """Results of calls outside the schedule. The steps before them have their own time, so that
        an actor that does not answer is not waited for as long as for many steps."""
        awaited = list(dict.fromkeys(refs))
        while self.flight and awaited and ray.wait(awaited, num_returns=len(awaited), timeout=0)[1]:
            self._land()
        return self._get(list(refs), self.wave_timeout)

    def _get(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """A call has many waves, each of which may take its time. A failure of one host makes the
        others lose it: the failure is what to show."""
        try:
            return super()._get(refs, timeout or self.chunk * self.wave_timeout)
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


def failed(ref: Any) -> bool:
    """Whether a call that has ended did so with an error."""
    try:
        ray.get(ref)
    except Exception:
        return True
    return False


class AutoDriver(StreamDriver):
    """Sends the first steps wave by wave, then chooses by how long the actors' calls take."""

    def __init__(self, *words: Any, **more: Any) -> None:
        self.streams: bool | None = None  # not yet known
        self.tried = 0
        super().__init__(*words, **more)

    def _join(self) -> None:
        if self.streams:
            super()._join()
        else:
            Driver._join(self)

    def _land(self) -> None:
        if self.streams:
            super()._land()
        else:
            Driver._land(self)

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
        kind = StreamDriver if self.streams else Driver
        count: int = kind.calls_per_step.fget(self)  # type: ignore[attr-defined]
        return count


def driver_class(transport: str) -> type[Driver]:
    """The driver of a transport."""
    return {"store": Driver, "stream": StreamDriver, "auto": AutoDriver}[transport]
