"""Ray actors whose processes live on from test to test: to import torch is most of a start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from treeprop_ray.config import RaySettings
from treeprop_ray.engine import runtime
from treeprop_ray.engine.actors import HostActor, Role
from treeprop_ray.engine.crew import Crew
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.stream import StreamActor

ANSWER_SECONDS = 60
KEPT = 6  # of a kind: each has 200 MB


def anew(actor: HostActor, role: Role) -> None:
    """Runs in the actor: as if its process had just begun."""
    if isinstance(actor, StreamActor):
        actor.disconnect()
    vars(actor).clear()
    actor.__init__(role)  # type: ignore[misc]


class WarmCrew(Crew):
    """Gives its actors' processes to the next crew, where the constructor runs anew."""

    idle: ClassVar[dict[type, list[Any]]] = {}

    def make(self) -> None:
        self.actors = [self._taken(index) for index in range(len(self.roles))]
        self._await_all()

    def _taken(self, index: int) -> Any:
        role, spare = self.roles[index], self.idle.setdefault(self.kind, [])
        while spare:
            actor = spare.pop()
            try:
                ray.get(actor.__ray_call__.remote(anew, role), timeout=ANSWER_SECONDS)
                return actor
            except (RayActorError, GetTimeoutError):  # dead, or stuck in an earlier test
                ray.kill(actor)
        return ray.remote(self.kind).options(num_cpus=0, max_restarts=0).remote(role)

    def close(self) -> None:
        spare = self.idle.setdefault(self.kind, [])
        room = KEPT - len(spare)
        spare += self.actors[: max(room, 0)]
        for actor in self.actors[max(room, 0) :]:
            ray.kill(actor)
        self.actors = []


@contextlib.contextmanager
def warm_ray() -> Iterator[None]:
    """The Ray of this test process, in which engines find actors that are up already. It stays for
    the next file that asks for it; a file that does not ends it (conftest.py)."""
    if not ray.is_initialized():
        WarmCrew.idle.clear()
        runtime.start(RaySettings(num_cpus=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "crew_class", WarmCrew)
        yield
