"""The driver: turns the schedule of a step into futures. It holds references, never tensors.

A step is submitted whole, without waiting: each call gets the references of its inputs, Ray runs
it when they are there, and an actor runs its calls in the order they were submitted. The driver
only waits for the step before the last `in_flight` ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from treeprop_ray.engine.actors import Role, actor_class
from treeprop_ray.engine.base import StepReport
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.placement import Plan
from treeprop_ray.schedule import Call

START_SECONDS = 300  # for all actors to import torch and build their parts


class Driver:
    """Makes the actors of a plan and sends them the calls of each step."""

    def __init__(
        self,
        plan: Plan,
        roles: Sequence[Role],
        calls: Sequence[Call],
        clip: bool,
        in_flight: int,
        transport: str,
    ) -> None:
        self.plan, self.calls, self.clip, self.in_flight = plan, calls, clip, in_flight
        self.direct = transport != "store"
        self.group: PlacementGroup | None = None
        self.actors: list[Any] = []
        self.flight: deque[list[Any]] = deque()
        self.last: list[StepReport] = []
        self._gauges = _Gauges(plan.names[0].rpartition("/")[0])
        try:
            self._make(roles, transport)
        except BaseException:
            self.close()
            raise
        self._bind()

    def _make(self, roles: Sequence[Role], transport: str) -> None:
        self.group = placement_group(self.plan.bundles, strategy=self.plan.strategy)
        if not self.group.wait(60):
            raise UserError(
                f"placement cannot fit now: {len(roles)} bundles of {self.plan.bundles[0]} are not "
                f"free (in use by others); free: {ray.available_resources()}"
            )
        cls = actor_class(transport)
        for index, role in enumerate(roles):
            options = cls.options(
                name=role.name,
                num_cpus=self.plan.cpus,
                num_gpus=self.plan.gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=index
                ),
            )
            self.actors.append(options.remote(role))
        self._get([actor.ready.remote() for actor in self.actors], START_SECONDS)
        if self.direct:
            from ray.experimental.collective import create_collective_group

            create_collective_group(self.actors, backend=transport)

    def _bind(self) -> None:
        """Prepare for every call its actor's method, its index there and where inputs come from."""
        counters = [0] * len(self.actors)
        self.bound = []
        for call in self.calls:
            returns = 1 if self.direct else max(1, len(call.packets))
            method = self.actors[call.host].run.options(num_returns=returns)
            self.bound.append((method, counters[call.host], call))
            counters[call.host] += 1

    def become(self, roles: Sequence[Role], calls: Sequence[Call]) -> None:
        """Give the same actors other roles."""
        self.wait()
        pairs = zip(self.actors, roles, strict=True)
        self._get([actor.become.remote(role) for actor, role in pairs])
        self.calls = calls
        self._bind()

    @property
    def calls_per_step(self) -> int:
        """Remote calls the driver submits for one step."""
        return len(self.calls) + len(self.actors) * (2 if self.clip else 1)

    def step(self, step: int, report: bool) -> None:
        """Submit one step; wait for an earlier one if too many are under way."""
        where: dict[tuple[int, str], Any] = {}
        tail: list[Any] = [None] * len(self.actors)
        for method, index, call in self.bound:
            packets = dict.fromkeys(where[call.piece, name] for name in call.inputs)
            out = method.remote(index, step, *packets)
            refs = out if isinstance(out, list) else [out]
            tail[call.host] = refs[0]
            for k, packet in enumerate(call.packets):
                ref = refs[0 if self.direct else k]
                where.update({(call.piece, name): ref for name in packet})
        if self.direct:
            tail = [None] * len(self.actors)  # a direct tensor must not be passed on needlessly
        # a host whose last call failed must not step its optimizer: `tail` makes it wait and fail
        if self.clip:
            reports = [
                a.report.remote(step, True, t) for a, t in zip(self.actors, tail, strict=True)
            ]
            done = [a.apply.remote(step, *reports) for a in self.actors]
            self.flight.append([*reports, *done])
        else:
            pairs = zip(self.actors, tail, strict=True)
            self.flight.append([a.finish.remote(step, report, t) for a, t in pairs])
        while len(self.flight) > self.in_flight:
            self._land()

    def _land(self) -> None:
        results = self._get(self.flight.popleft())
        self.last = [r for r in results if isinstance(r, StepReport)]
        self._gauges.landed(len(self.flight))

    def wait(self) -> list[StepReport]:
        """Wait for all submitted steps; the reports of the last one."""
        while self.flight:
            self._land()
        return self.last

    def _get(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """ray.get that speaks plainly about what went wrong."""
        try:
            return list(ray.get(refs, timeout=timeout))
        except RayTaskError as e:
            cause = getattr(e, "cause", None)
            while isinstance(cause, RayTaskError):
                cause = cause.cause
            if isinstance(cause, TrainingError | UserError):
                raise cause from None
            if isinstance(cause, RayActorError):
                raise TrainingError(f"an actor died: {first_line(cause)}") from e
            raise TrainingError(f"an actor failed: {first_line(cause or e)}") from e
        except RayActorError as e:
            raise TrainingError(f"an actor died: {first_line(e)}") from e
        except GetTimeoutError as e:
            raise TrainingError(f"actors did not start within {START_SECONDS} s") from e

    def get(self, refs: list[Any]) -> list[Any]:
        """Results of calls outside the schedule (evaluation, state)."""
        return self._get(refs)

    def close(self) -> None:
        """End all actors and give back their resources."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        self.flight.clear()
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


class _Gauges:
    """Metrics of the driver for the dashboard and Prometheus."""

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

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
