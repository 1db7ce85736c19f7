"""The driver: turns the schedule of a step into futures. It holds references, never tensors.

A step is submitted whole, without waiting: each call gets the references of its inputs, Ray runs
it when they are there, and an actor runs its calls in the order they were submitted. The driver
only waits for the step before the last `in_flight` ones.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util.metrics import Gauge
from torch._C._distributed_c10d import TCPStore

from treeprop_ray.core.rule import HeldOut
from treeprop_ray.engine.actors import HostActor, Role
from treeprop_ray.engine.collective import backend_of
from treeprop_ray.engine.crew import ANSWER_SECONDS, START_SECONDS, Crew
from treeprop_ray.engine.direct import Rendezvous
from treeprop_ray.engine.points import Point, keepers
from treeprop_ray.engine.versions import Reach, common
from treeprop_ray.errors import ActorLost
from treeprop_ray.hosts.base import StepReport
from treeprop_ray.schedule.ops import STEP, Call
from treeprop_ray.schedule.placement import Plan

MOST = 64  # steps in one call
Bound = tuple[Any, int, Call]  # an actor's method, the call's index there, the call


class Driver:
    """Has the actors of a plan made and sends them the calls of each step."""

    crew_class = Crew
    actor_class: type[HostActor] = HostActor

    def __init__(
        self,
        plan: Plan,
        roles: Sequence[Role],
        calls: Sequence[Call],
        clip: bool,
        in_flight: int,
        wave_timeout: float = 600.0,
        others: Mapping[str, Sequence[Call]] | None = None,
        pass_at: Callable[[int], str] = lambda step: STEP,
        shards: bool = False,
        avoid: Collection[str] = (),
        fast: bool = False,
        most: int = MOST,
    ) -> None:
        """`others`: calls of other passes, by name; a role lists them after its step's calls.
        `pass_at`: the pass that a training step is. `avoid`: ids of machines that others cannot
        reach. `fast`: copies add up gradients by an all-reduce. `most`: steps that may be sent in
        one call; they are all done again if an actor is lost meanwhile."""
        self.plan, self.calls, self.clip, self.fast = plan, calls, clip, fast
        self.store: TCPStore | None = None  # where actors meet that torch.distributed joins
        self.in_flight, self.wave_timeout = in_flight, wave_timeout
        self.others, self.pass_at = others or {}, pass_at
        self.shards, self.most = shards, min(most, MOST)
        self.roles = self._completed(roles)
        self.flight: deque[list[Any]] = deque()
        self.last: list[StepReport] = []
        self._gauges = _Gauges(plan.names[0].rpartition("/")[0])
        self.crew = self.crew_class(plan, self.actor_class, self.roles, wave_timeout, avoid)
        try:
            self.crew.make()
            self._look_around()
            self._join()
        except BaseException:
            self.close()
            raise
        self._bind()

    def _completed(self, roles: Sequence[Role]) -> Sequence[Role]:
        """The roles with what the transport adds to them."""
        return roles

    def _look_around(self) -> None:
        """Who keeps whose state."""
        machines = [actor.machine.remote() for actor in self.actors]
        twins = len(self.plan.names) if self.alike else 0
        self.keepers = keepers(self._get(machines, START_SECONDS), twins)

    @property
    def actors(self) -> list[Any]:
        """The actors, in the order of their roles."""
        return self.crew.actors

    @property
    def alike(self) -> bool:
        """Whether copies of a host have the same state."""
        return self.plan.copies > 1 and not self.shards

    def _join(self) -> None:
        """Connect the actors; the object store needs no connections, but an all-reduce does."""
        if not self.fast:
            return
        gpus: list[str] = self._get([actor.gpu.remote() for actor in self.actors])
        hosts, session, place = len(self.plan.names), secrets.token_hex(4), self._meeting()
        met = []
        for index, actor in enumerate(self.actors):
            first = index % hosts
            words = (f"{session}-{first}", backend_of(gpus[first::hosts]), self.wave_timeout)
            met.append(actor.meet.remote(place, *words))
        self._get(met)

    def _meeting(self) -> Rendezvous:
        """Where actors meet that torch.distributed joins."""
        if self.store is None:
            host = ray.util.get_node_ip_address()
            self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return self.store.host, self.store.port

    def lost(self) -> list[int]:
        """The hosts whose actors are dead or do not answer."""
        self.flight.clear()
        return self.crew.lost()

    def revive(self, lost: Sequence[int]) -> None:
        """Make lost actors anew in their places; ActorLost when a place is gone."""
        self.crew.revive(lost)
        self._look_around()
        self._bind()
        self._join()

    def _bind(self) -> None:
        """Prepare for every call its actor's method, its index there and where inputs come from."""
        counters = [0] * len(self.actors)

        def bind(calls: Sequence[Call]) -> list[Bound]:
            bound, ends = [], self._ends(calls)
            for call in calls:
                actor = self.actors[call.host]
                if call is ends.get(call.host):
                    method = actor.run_last.options(num_returns=self.plan.copies)
                else:
                    method = actor.run.options(num_returns=max(1, len(call.packets)))
                bound.append((method, counters[call.host], call))
                counters[call.host] += 1
            return bound

        passes = {STEP: self.calls, **self.others}
        self.bound = {name: bind(calls) for name, calls in passes.items()}

    def _ends(self, calls: Sequence[Call]) -> dict[int, Call]:
        """With copies: by host its last call, if it also hands out the gradients. It does not where
        somebody waits for tensors of the call: gradients of weights come after those."""
        final = {call.host: call for call in calls} if self.plan.copies > 1 else {}
        return {host: call for host, call in final.items() if not call.packets}

    def become(self, roles: Sequence[Role], calls: Sequence[Call]) -> None:
        """Give the same actors other roles."""
        self.wait()
        self.calls = calls
        self.roles = self.crew.roles = self._completed(roles)
        pairs = zip(self.actors, self.roles, strict=True)
        self._get([actor.become.remote(role) for actor, role in pairs])
        self._bind()
        self._join()

    @property
    def calls_per_step(self) -> int:
        """Remote calls the driver submits for one step."""
        count = len(self.calls) + len(self.actors) * (1 + self.clip + self.shards)
        if self.plan.copies > 1:  # hand out, add up
            count += 2 * len(self.actors) - len(self._ends(self.calls))
        return count

    def submit(self, bound: Sequence[Bound], at: int | HeldOut) -> list[list[Any]]:
        """Send the calls of one batch; returns what each actor's last call will give."""
        where: dict[tuple[int, str], Any] = {}
        tail: list[list[Any]] = [[] for _ in self.actors]
        for method, index, call in bound:
            packets = dict.fromkeys(where[call.piece, name] for name in call.inputs)
            out = method.remote(index, at, *packets)
            tail[call.host] = refs = out if isinstance(out, list) else [out]
            for ref, packet in zip(refs, call.packets, strict=False):
                where.update({(call.piece, name): ref for name in packet})
        return tail

    def step(self, step: int, report: bool) -> None:
        """Submit one step; wait for an earlier one if too many are under way."""
        bound = self.bound[self.pass_at(step)]
        last = self.submit(bound, step)
        sums = self._sums(step, last, self._ends([call for _, _, call in bound]))
        hosts = len(self.plan.names)  # of what it hands out a host waits for what it keeps itself
        tail = [r[min(i // hosts, len(r) - 1)] if r else None for i, r in enumerate(last)]
        # a host whose last call failed must not step its optimizer: `tail` makes it wait and fail
        if self.clip:
            pairs = zip(self.actors, sums, strict=True)
            reports = [a.report.remote(step, True, *s) for a, s in pairs]
            done = [
                a.apply.options(num_returns=2 if self.shards else 1).remote(
                    step, tail[i], *(reports[j] for j in self._fellows(i) if j != i)
                )
                for i, a in enumerate(self.actors)
            ]
        else:
            returns = 3 if self.shards else 1
            reports = [
                a.finish.options(num_returns=returns).remote(step, report, t, *s)
                for a, t, s in zip(self.actors, tail, sums, strict=True)
            ]
            done = []
            if self.shards:
                done, reports = [told[1:] for told in reports], [told[0] for told in reports]
        if self.shards:
            weights, slots = zip(*done, strict=True)
            pairs = zip(self.actors, self._of_twins(weights), strict=True)
            done = [a.renew.remote(step, slots[i - hosts], *w) for i, (a, w) in enumerate(pairs)]
        self.flight.append([*reports, *done])
        while len(self.flight) > self.in_flight:
            self._land()

    def _fellows(self, index: int) -> range:
        """The hosts of an actor's copy."""
        hosts = len(self.plan.names)
        return range(first := index - index % hosts, first + hosts)

    def _of_twins(self, made: Sequence[Any]) -> list[list[Any]]:
        """For each actor what the other copies of its host have made."""
        hosts, count = len(self.plan.names), len(self.actors)
        return [[made[j] for j in range(i % hosts, count, hosts) if j != i] for i in range(count)]

    def _sums(
        self, step: int, last: Sequence[list[Any]], ends: Mapping[int, Call]
    ) -> list[list[Any]]:
        """With copies: have them add up their gradients; for each actor what it gets of others.
        `last` is what each actor's last call gives, `ends` those that hand out as well."""
        copies, hosts = self.plan.copies, len(self.plan.names)
        if copies == 1:
            return [[] for _ in self.actors]
        given = [
            last[i] if i in ends else a.hand_out.options(num_returns=copies).remote(step, *last[i])
            for i, a in enumerate(self.actors)
        ]
        added = [
            a.add_up.remote(step, *(packets[i // hosts] for packets in mine))
            for i, (a, mine) in enumerate(zip(self.actors, self._of_twins(given), strict=True))
        ]
        return self._of_twins(added)

    def _land(self) -> None:
        results = self._get(self.flight.popleft())
        reports = [r for r in results if isinstance(r, StepReport)]
        self.last = reports[: len(self.plan.names)]  # the copies' are the same
        self._gauges.landed(len(self.flight))

    def flush(self) -> None:
        """Submit what is waiting to be submitted together."""

    def wait(self) -> list[StepReport]:
        """Wait for all submitted steps; the reports of the last one."""
        self.flush()
        while self.flight:
            self._land()
        return self.last

    def _get(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
        return self.crew.get(refs, timeout)

    def ask(self, host: int, verb: Callable[..., Any], *words: Any, returns: int = 1) -> Any:
        """A future of what a host's own method gives; words may be such futures."""
        self.flush()
        return self.actors[host].ask.options(num_returns=returns).remote(verb, *words)

    def snapshot(self, step: int, since: int) -> Point:
        """The states of all actors, behind the steps that are submitted, as the point of `step`;
        earlier ones are needed from `since` on."""
        self.flush()
        return Point.taken(self.actors, self.keepers, step, since, own=self.alike)

    def told(self, lost: Collection[int]) -> dict[int, Reach]:
        """How far those are who live, and can go back."""
        alive = [i for i in range(len(self.actors)) if i not in lost]
        try:
            answers = self._get([self.actors[i].reach.remote() for i in alive], ANSWER_SECONDS)
        except ActorLost:  # more are lost now, and will be missed
            return {}
        return dict(zip(alive, answers, strict=True))

    def recall(self, told: Mapping[int, Reach], until: int | None) -> tuple[int, Point] | None:
        """The newest step, at most `until`, that those who live can bring back together."""
        shards = len(self.actors) if self.shards else 0
        step = common(told, len(self.plan.names), until, shards)
        if step is None:
            return None
        those = [self.actors[i] for i, reach in told.items() if step in reach.steps]
        point = Point.recalled(those, step, whole=self.alike)
        try:
            self._get(point.names)
        except ActorLost:
            return None
        return step, point

    def hold(self, step: int | None) -> None:
        """Have actors stay able to go back to a step, which is the next one, or to none."""
        if any(role.versions for role in self.roles):
            self.flush()
            for actor in self.actors:
                actor.hold.remote(step)

    def states(self) -> list[Any]:
        """Futures of the state of every actor, to be fetched at once."""
        self.flush()
        return Point.taken(self.actors, [None] * len(self.actors)).states

    def restore(self, point: Point, step: int) -> None:
        """Bring all actors to a point, of the time before `step`."""
        self._get(point.load(self.actors, step))

    def probe(self, name: str, at: HeldOut) -> None:
        """Run the calls of a pass on a held-out batch; waits for them."""
        self.submit(self.bound[name], at)
        self._get([actor.settled.remote() for actor in self.actors])

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """Results of calls outside the schedule (evaluation, state)."""
        return self._get(list(refs))

    def close(self) -> None:
        """End all actors and give back their resources."""
        self.crew.close()
        self.flight.clear()


class _Gauges:
    """Metrics of the driver for the dashboard and Prometheus."""

    def __init__(self, run: str) -> None:
        self.seconds = Gauge("treeprop_step_seconds", "seconds from step to step", ("run",))
        self.flight = Gauge("treeprop_steps_in_flight", "steps submitted and not done", ("run",))
        for gauge in (self.seconds, self.flight):
            gauge.set_default_tags({"run": run})
        self._last: float | None = None

    def landed(self, in_flight: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.set(now - self._last)
        self._last = now
        self.flight.set(in_flight)
