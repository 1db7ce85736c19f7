"""What counts as a loss, how often, and what ends a run: over the engine's own classes, no Ray."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import ray
from ray import exceptions as known
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from test_recovery import FakeDriver, recovering

from treeprop_ray.engine.crew import LOSSES, ActorLate, Crew
from treeprop_ray.engine.stream import StreamDriver
from treeprop_ray.errors import ActorLost, TrainingError, UserError


def made(kind: type[RayError]) -> RayError:
    """An error of a kind, without what its constructor wants to know."""
    error = kind.__new__(kind)
    Exception.__init__(error, f"a {kind.__name__}")
    error.__dict__.update(object_ref_hex="ab", owner_address="", call_site="", cause=None)
    kind.__str__ = lambda self: f"a {kind.__name__}"  # type: ignore[method-assign, assignment]
    return error


def crew_whose_get(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Crew:
    crew = Crew.__new__(Crew)
    crew.wave_timeout, crew.roles, crew.actors = 1.0, [], []

    def get(refs: Any, timeout: float) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    return crew


LOST = ["OutOfMemoryError", "NodeDiedError", "WorkerCrashedError", "RaySystemError",
        "ObjectStoreFullError", "OutOfDiskError", "RpcError", "ActorDiedError",
        "ActorUnavailableError", "OwnerDiedError", "ObjectFetchTimedOutError"]  # fmt: skip


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_ray_says_of_a_loss_is_a_loss(
    name: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(known, name)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__str__", kind.__str__)
        error: RayError = made(kind)
        if wrapped:
            error = RayTaskError("run", "…", error, pid=1, ip="127.0.0.1", actor_repr="x")
        with pytest.raises(ActorLost, match=f"a {name}"):
            crew_whose_get(error, patch).get([1])


def test_every_other_error_of_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [k for k in vars(known).values() if isinstance(k, type) and issubclass(k, RayError)]
    others = [k for k in kinds if not issubclass(k, (*LOSSES, RayTaskError, GetTimeoutError))]
    assert len(others) > 10
    for kind in others:
        with monkeypatch.context() as patch:
            patch.setattr(kind, "__str__", kind.__str__)
            with pytest.raises(TrainingError) as caught:
                crew_whose_get(made(kind), patch).get([1])
            assert not isinstance(caught.value, ActorLost) and "\n" not in str(caught.value)


def test_no_answer_is_a_loss_that_names_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = crew_whose_get(GetTimeoutError("late"), monkeypatch)
    crew.roles = [type("Role", (), {"name": f"r/host-{k}"}) for k in range(2)]  # type: ignore[misc]
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([refs[0]], [refs[1]]))
    with pytest.raises(ActorLate, match="no answer within 1 s from r/host-1"):
        crew.get(["a", "b"])


def test_an_answer_is_not_waited_for_as_long_as_for_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transport=stream: a call of the driver is for many steps, an evaluation is not."""
    waits: list[tuple[list[str], float]] = []

    class Waits:
        def get(self, refs: list[str], timeout: float) -> list[str]:
            waits.append((refs, timeout))
            return refs

    driver = StreamDriver.__new__(StreamDriver)
    driver.crew, driver.chunk, driver.wave_timeout = Waits(), 8, 20.0  # type: ignore[assignment]
    driver.flight, driver.plan = (
        deque([["steps 0 to 7"]]),
        type("Plan", (), {"names": ["r/host-0"]}),
    )
    driver._gauges = type("Gauges", (), {"landed": lambda self, count: None})()
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], refs))
    assert driver.get(["score", "score"]) == ["score", "score"]
    assert waits == [(["steps 0 to 7"], 160.0), (["score", "score"], 20.0)]
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    driver.flight.append(["steps 8 to 15"])
    driver.get(["a point that is there"])
    assert len(driver.flight) == 1  # steps go on


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_in_a_later_call_is_heard_while_the_oldest_is_under_way(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """transport=stream: an actor that waits for nobody goes on for many steps."""

    class Crew:
        def get(self, refs: list[str], timeout: float) -> list[str]:
            if "killed" in refs or late:
                raise ActorLost(f"{len(refs)} calls")
            return refs

    done = {"a 0", "b 0", "b 1"}

    def get(ref: str) -> None:
        if ref == "killed":
            raise ActorLost(ref)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([r for r in refs if r in done], []))
    driver = StreamDriver.__new__(StreamDriver)
    driver.crew, driver.chunk, driver.wave_timeout = Crew(), 8, 20.0  # type: ignore[assignment]
    driver.plan = type("Plan", (), {"names": ["r/host-0"]})  # type: ignore[assignment]
    driver._gauges = type("Gauges", (), {"landed": lambda self, count: None})()
    driver.flight = deque([["a 0", "b 0"], ["a 1", "b 1"]])
    if late:
        done.clear()
        with pytest.raises(ActorLost, match="2 calls"):
            driver._land()
        return
    driver._land()
    assert list(driver.flight) == [["a 1", "b 1"]]
    done.add("killed")
    driver.flight.append(["killed", "b 2"])
    with pytest.raises(ActorLost, match="4 calls"):  # a 1 is under way
        driver._land()


# -- episodes -------------------------------------------------------------------------------------


class Clumsy(FakeDriver):
    """Loses its actor again while it recovers, so many times."""

    again = 0

    def revive(self, lost: list[int]) -> None:
        super().revive(lost)
        if self.again:
            self.again -= 1
            raise ActorLost("again")


def test_an_episode_of_losses_counts_once() -> None:
    driver = Clumsy(die_at={3, 6})
    recovery = recovering(driver, max_failures=2)
    recovery._mend = driver.revive  # type: ignore[method-assign]
    for step in range(8):
        driver.again = 7 if step in (3, 6) else 0
        recovery.step(step, report=False)
    assert recovery.failures == 2 and driver.total == sum(range(8))


def test_an_episode_without_end_ends_the_run() -> None:
    driver = Clumsy(die_at={3})
    driver.again = 10**6
    recovery = recovering(driver, max_failures=2)
    recovery._mend = driver.revive  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"times in a row \(again\)"):
        for step in range(5):
            recovery.step(step, report=False)


def test_actors_that_die_at_the_first_start_are_made_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recovery, tries = recovering(FakeDriver(), max_failures=3), []

    def start() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ActorLost("r/host-1 died while it was made: killed")

    recovery.first(start)
    assert len(tries) == 3 and capsys.readouterr().err.count("lost r/host-1 died while") == 2
    with pytest.raises(ActorLost, match="r/host-1"):
        recovering(FakeDriver(), max_failures=0).first(lambda: start_and_die())

    def never() -> None:
        raise UserError("hosts=9: too many")

    with pytest.raises(UserError):
        recovering(FakeDriver()).first(never)


def start_and_die() -> None:
    raise ActorLost("r/host-1 died while it was made: killed")
