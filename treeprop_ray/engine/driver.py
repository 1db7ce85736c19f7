"""The driver: turns the schedule of a step into futures. It holds references, never tensors.

A step is submitted whole, without waiting: each call gets the references of its inputs, Ray runs
it when they are there, and an actor runs its calls in the order they were submitted. The driver
only waits for the step before the last `in_flight` ones.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    RpcError,
    WorkerCrashedError,
)
from ray.util.metrics import Gauge
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from treeprop_ray.core.rule import HeldOut
from treeprop_ray.engine.actors import HostActor, Role
from treeprop_ray.engine.points import Point, keepers
from treeprop_ray.errors import ActorLost, TrainingError, UserError, first_line
from treeprop_ray.hosts.base import StepReport
from treeprop_ray.schedule.ops import STEP, Call
from treeprop_ray.schedule.placement import Plan

START_SECONDS = 300  # for all actors to import torch and build their parts
GROUP_SECONDS = 60  # for a placement group that should fit
REVIVE_SECONDS = 60  # for actors that are made anew
ANSWER_SECONDS = 60  # for actors that live, when somebody was lost
MOVE_SECONDS = 3  # for Ray to find another machine for the bundle of a lost one


# what Ray says when a process, a machine or a tensor is gone; all go back and replay
LOSSES = (
    RayActorError, ObjectLostError, OutOfMemoryError, NodeDiedError, WorkerCrashedError,
    RaySystemError, ObjectStoreFullError, OutOfDiskError, RpcError,
)  # fmt: skip

Bound = tuple[Any, int, Call]  # an actor's method, the call's index there, the call


class ActorLate(ActorLost):
    """No answer in time: an actor is stuck, paused, or cut off from the others."""


class PlacementBusy(UserError):
    """The plan fits the cluster, but not what is free now."""


class Driver:
    """Makes the actors of a plan and sends them the calls of each step."""

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
    ) -> None:
        """`others`: calls of other passes, by name; a role lists them after its step's calls.
        `pass_at`: the pass that a training step is. `avoid`: ids of machines that others cannot
        reach."""
        self.avoid = avoid
        self.plan, self.roles, self.calls, self.clip = plan, roles, calls, clip
        self.in_flight, self.wave_timeout = in_flight, wave_timeout
        self.others, self.pass_at = others or {}, pass_at
        self.shards = shards
        self.group: PlacementGroup | None = None
        self.owns_group, self.first_bundle = True, 0
        self.actors: list[Any] = []
        self.flight: deque[list[Any]] = deque()
        self.last: list[StepReport] = []
        self._gauges = _Gauges(plan.names[0].rpartition("/")[0])
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        self._bind()

    def _make(self) -> None:
        self._take_group()
        assert self.group is not None
        if not self.group.wait(GROUP_SECONDS):
            raise PlacementBusy(
                f"placement cannot fit now: {len(self.roles)} bundles of {self.plan.bundles[0]} "
                f"are not free (in use by others); free: {ray.available_resources()}"
            )
        self.actors = [self._actor_anew(index) for index in range(len(self.roles))]
        try:
            self._get([actor.ready.remote() for actor in self.actors], START_SECONDS)
        except ActorLost as e:
            names = ", ".join(self.roles[i].name for i in self.lost()) or "an actor"
            raise ActorLost(f"{names} died while it was made: {e}") from e
        self._look_around()
        self._join()

    def _look_around(self) -> None:
        """Who keeps whose state."""
        machines = [actor.machine.remote() for actor in self.actors]
        twins = len(self.plan.names) if self.alike else 0
        self.keepers = keepers(self._get(machines, START_SECONDS), twins)

    @property
    def alike(self) -> bool:
        """Whether copies of a host have the same state."""
        return self.plan.copies > 1 and not self.shards

    def _take_group(self) -> None:
        """A Tune trial comes with a placement group whose last bundles are ours; else make one."""
        around, count = get_current_placement_group(), len(self.roles)
        if around is not None and around.bundle_specs[-count:] == self.plan.bundles:
            self.group, self.owns_group = around, False
            self.first_bundle = len(around.bundle_specs) - count
        else:
            elsewhere = {"ray.io/node-id": f"!in({','.join(sorted(self.avoid))})"}
            self.group = placement_group(
                self.plan.bundles,
                strategy=self.plan.strategy,
                bundle_label_selector=[elsewhere] * count if self.avoid else None,
            )

    def _actor(self, index: int) -> Any:
        """Start the actor of a role in its bundle. Ray must not restart it: state would be lost."""
        return (
            self.actor_class()
            .options(
                name=self.roles[index].name,
                num_cpus=self.plan.cpus,
                num_gpus=self.plan.gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=self.first_bundle + index
                ),
            )
            .remote(self.roles[index])
        )

    def actor_class(self) -> Any:
        """What an actor is made of."""
        return ray.remote(HostActor)

    def _join(self) -> None:
        """Connect the actors; the object store needs no connections."""

    def lost(self) -> list[int]:
        """The hosts whose actors are dead or do not answer."""
        self.flight.clear()
        refs = [actor.ready.remote() for actor in self.actors]
        ray.wait(refs, num_returns=len(refs), timeout=ANSWER_SECONDS)
        return [i for i, ref in enumerate(refs) if not self._answers(ref)]

    def revive(self, lost: Sequence[int]) -> None:
        """Make lost actors anew in their places; the others live on.

        Raises ActorLost when a place is gone with its machine: then a new plan is needed.
        """
        if self.group is None:
            raise ActorLost("all actors were ended")  # by an attempt to find new places
        for index in lost:
            with contextlib.suppress(Exception):  # it may hang rather than be dead
                ray.kill(self.actors[index])
            self.actors[index] = self._actor_anew(index)
        refs = [self.actors[i].ready.remote() for i in lost]
        deadline = time.monotonic() + REVIVE_SECONDS
        while ray.wait(refs, num_returns=len(refs), timeout=1)[1]:
            if time.monotonic() > deadline or not self._has_places():
                raise ActorLost("the place of an actor is gone")
        self._get(refs)
        self._look_around()
        self._bind()

    def _has_places(self) -> bool:
        """Whether every bundle has a machine; Ray moves bundles of a lost one if there is room."""
        return self.group is not None and self.group.wait(MOVE_SECONDS)

    def _actor_anew(self, index: int) -> Any:
        """Ray frees the name of a dead actor only after a moment."""
        for _ in range(100):
            try:
                return self._actor(index)
            except ValueError:  # ActorAlreadyExistsError is one
                time.sleep(0.1)
        raise ActorLost(f"the name {self.roles[index].name} stays taken")

    def _answers(self, ref: Any) -> bool:
        try:
            ray.get(ref, timeout=0)
        except (RayError, GetTimeoutError):
            return False
        return True

    def _bind(self) -> None:
        """Prepare for every call its actor's method, its index there and where inputs come from."""
        counters = [0] * len(self.actors)

        def bind(calls: Sequence[Call]) -> list[Bound]:
            bound = []
            for call in calls:
                returns = max(1, len(call.packets))
                method = self.actors[call.host].run.options(num_returns=returns)
                bound.append((method, counters[call.host], call))
                counters[call.host] += 1
            return bound

        passes = {STEP: self.calls, **self.others}
        self.bound = {name: bind(calls) for name, calls in passes.items()}

    def become(self, roles: Sequence[Role], calls: Sequence[Call]) -> None:
        """Give the same actors other roles."""
        self.wait()
        pairs = zip(self.actors, roles, strict=True)
        self._get([actor.become.remote(role) for actor, role in pairs])
        self.roles, self.calls = roles, calls
        self._bind()

    @property
    def calls_per_step(self) -> int:
        """Remote calls the driver submits for one step."""
        return len(self.calls) + len(self.actors) * (2 if self.clip else 1)

    def submit(self, bound: Sequence[Bound], at: int | HeldOut) -> list[Any]:
        """Send the calls of one batch; returns what each actor's last call will give."""
        where: dict[tuple[int, str], Any] = {}
        tail: list[Any] = [None] * len(self.actors)
        for method, index, call in bound:
            packets = dict.fromkeys(where[call.piece, name] for name in call.inputs)
            out = method.remote(index, at, *packets)
            refs = out if isinstance(out, list) else [out]
            tail[call.host] = refs[0]
            for ref, packet in zip(refs, call.packets, strict=False):
                where.update({(call.piece, name): ref for name in packet})
        return tail

    def step(self, step: int, report: bool) -> None:
        """Submit one step; wait for an earlier one if too many are under way."""
        tail = self.submit(self.bound[self.pass_at(step)], step)
        sums = self._sums(step, tail)
        # a host whose last call failed must not step its optimizer: `tail` makes it wait and fail
        if self.clip:
            pairs = zip(self.actors, sums, strict=True)
            reports = [a.report.remote(step, True, *s) for a, s in pairs]
            done = [
                a.apply.remote(step, tail[i], *(reports[j] for j in self._fellows(i) if j != i))
                for i, a in enumerate(self.actors)
            ]
        else:
            returns = 2 if self.shards else 1
            ends = zip(self.actors, tail, sums, strict=True)
            reports = [
                a.finish.options(num_returns=returns).remote(step, report, t, *s)
                for a, t, s in ends
            ]
            done = []
            if self.shards:
                reports, done = map(list, zip(*reports, strict=True))
        if self.shards:
            pairs = zip(self.actors, self._of_twins(done), strict=True)
            done = [a.renew.remote(step, *weights) for a, weights in pairs]
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

    def _sums(self, step: int, tail: Sequence[Any]) -> list[list[Any]]:
        """With copies: have them add up their gradients; for each actor what it gets of others."""
        copies, hosts = self.plan.copies, len(self.plan.names)
        if copies == 1:
            return [[] for _ in self.actors]
        given = [
            a.hand_out.options(num_returns=copies).remote(step, t)
            for a, t in zip(self.actors, tail, strict=True)
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
        """ray.get that speaks plainly about what went wrong."""
        try:
            return list(ray.get(refs, timeout=timeout or self.wave_timeout))
        except RayTaskError as e:
            cause = getattr(e, "cause", None)
            while isinstance(cause, RayTaskError):
                cause = cause.cause
            if isinstance(cause, TrainingError | UserError):
                raise cause from None
            self._check_made(cause)
            if isinstance(cause, LOSSES):
                raise ActorLost(first_line(cause)) from e
            raise TrainingError(f"an actor failed: {first_line(cause or e)}") from e
        except LOSSES as e:
            self._check_made(e)
            raise ActorLost(first_line(e)) from e
        except GetTimeoutError as e:
            raise ActorLate(self._late(refs, timeout or self.wave_timeout)) from e
        except RayError as e:
            raise TrainingError(f"Ray failed: {type(e).__name__}: {first_line(e)}") from e

    def _check_made(self, error: object) -> None:
        """An actor that cannot even be given its role is not lost: it would break again."""
        if isinstance(error, RayActorError) and getattr(error, "actor_init_failed", False):
            lines = [line for line in str(error).splitlines() if line.strip()]
            ids = [actor._actor_id.hex() for actor in self.actors]
            names = [r.name for r, i in zip(self.roles, ids, strict=True) if i == error.actor_id]
            name = " ".join(["actor", *names])
            raise TrainingError(f"{name} cannot be made: {lines[-1].strip()}") from None

    def _late(self, refs: list[Any], seconds: float) -> str:
        """Names the actors whose calls have not come back."""
        _, missing = ray.wait(refs, num_returns=len(refs), timeout=0)
        late = {self.roles[refs.index(ref) % len(self.roles)].name for ref in missing}
        return f"no answer within {seconds:g} s from {', '.join(sorted(late))}"

    def ask(self, host: int, verb: Callable[..., Any], *words: Any, returns: int = 1) -> Any:
        """A future of what a host's own method gives; words may be such futures."""
        self.flush()
        return self.actors[host].ask.options(num_returns=returns).remote(verb, *words)

    def snapshot(self, step: int) -> Point:
        """The states of all actors, behind the steps that are submitted, as the point of `step`."""
        self.flush()
        return Point.taken(self.actors, self.keepers, step, own=self.alike)

    def states(self) -> list[Any]:
        """Futures of the state of every actor, to be fetched at once."""
        self.flush()
        return Point.taken(self.actors, [None] * len(self.actors), 0).states

    def restore(self, point: Point) -> None:
        """Bring all actors to a point."""
        self._get(point.load(self.actors))

    def probe(self, name: str, at: HeldOut) -> None:
        """Run the calls of a pass on a held-out batch; waits for them."""
        self.submit(self.bound[name], at)
        self._get([actor.settled.remote() for actor in self.actors])

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """Results of calls outside the schedule (evaluation, state)."""
        return self._get(list(refs))

    def close(self) -> None:
        """End all actors and give back their resources."""
        for actor in self.actors:
            with contextlib.suppress(Exception):  # it may be dead already
                ray.kill(actor)
        self.actors = []
        self.flight.clear()
        if self.group is not None and self.owns_group:
            remove_placement_group(self.group)
        self.group = None


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
