"""The actors of a plan: made in their places, asked, found lost, made anew.

A place is a bundle of a placement group, so that all actors start or none does. Ray must not
restart an actor by itself: it would run the constructor again and lose the state without a word.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
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
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from treeprop_ray.engine.actors import HostActor, Role
from treeprop_ray.errors import ActorLost, TrainingError, UserError, first_line
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


class ActorLate(ActorLost):
    """No answer in time: an actor is stuck, paused, or cut off from the others."""


class PlacementBusy(UserError):
    """The plan fits the cluster, but not what is free now."""


class Crew:
    """The actors of a plan, one for each role."""

    def __init__(
        self,
        plan: Plan,
        kind: type[HostActor],
        roles: Sequence[Role],
        wave_timeout: float,
        avoid: Collection[str] = (),
    ) -> None:
        """`kind`: what an actor is made of. `avoid`: ids of machines that others cannot reach."""
        self.plan, self.kind, self.roles = plan, kind, roles
        self.wave_timeout, self.avoid = wave_timeout, avoid
        self.group: PlacementGroup | None = None
        self.owns_group, self.first_bundle = True, 0
        self.actors: list[Any] = []

    def make(self) -> None:
        """Start all actors and wait until they have built their parts."""
        self._take_group()
        assert self.group is not None
        if not self.group.wait(GROUP_SECONDS):
            raise PlacementBusy(
                f"placement cannot fit now: {len(self.roles)} bundles of {self.plan.bundles[0]} "
                f"are not free (in use by others); free: {ray.available_resources()}"
            )
        self.actors = [self._actor_anew(index) for index in range(len(self.roles))]
        self._await_all()

    def _await_all(self) -> None:
        try:
            self.get([actor.ready.remote() for actor in self.actors], START_SECONDS)
        except ActorLost as e:
            names = ", ".join(self.roles[i].name for i in self.lost()) or "an actor"
            raise ActorLost(f"{names} died while it was made: {e}") from e

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
                bundle_label_selector=self.plan.selectors
                or ([elsewhere] * count if self.avoid else None),
            )

    def _actor(self, index: int) -> Any:
        """Start the actor of a role in its bundle."""
        return (
            ray.remote(self.kind)
            .options(
                name=self.roles[index].name,
                num_cpus=self.plan.cpus,
                num_gpus=self.plan.bundles[index].get("GPU", 0.0),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=self.first_bundle + index
                ),
            )
            .remote(self.roles[index])
        )

    def lost(self) -> list[int]:
        """The hosts whose actors are dead or do not answer."""
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
        self.get(refs)

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

    def get(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
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

    def close(self) -> None:
        """End all actors and give back their resources."""
        for actor in self.actors:
            with contextlib.suppress(Exception):  # it may be dead already
                ray.kill(actor)
        self.actors = []
        if self.group is not None and self.owns_group:
            remove_placement_group(self.group)
        self.group = None
