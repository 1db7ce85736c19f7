"""The point and the journal: what is replayed, what counts, when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from treeprop_ray.config import Settings
from treeprop_ray.engine.recovery import Recovery
from treeprop_ray.engine.versions import Reach
from treeprop_ray.errors import ActorLost, TrainingError


@dataclass
class Role:
    name: str


@dataclass
class FakePoint:
    total: int
    names: tuple[()] = ()
    kept: tuple[()] = ()

    def arrived(self) -> bool:
        return True

    def without(self, lost: list[int], hosts: int) -> None:
        """Nobody else has the state of the one actor."""


@dataclass
class FakeDriver:
    """Does what a driver does to one actor, in this process: a step adds its number to a sum."""

    die_at: set[int] = field(default_factory=set)
    total: int = 0
    steps: list[int] = field(default_factory=list)
    roles: list[Role] = field(default_factory=lambda: [Role("run/host-0")])
    calls: tuple[()] = ()

    def step(self, step: int, report: bool) -> None:
        if step in self.die_at:
            self.die_at.discard(step)
            raise ActorLost("killed")
        self.total += step
        self.steps.append(step)

    def snapshot(self, step: int, since: int) -> Any:
        return FakePoint(self.total)

    def restore(self, point: Any, step: int) -> None:
        self.total = point.total

    def get(self, refs: Any) -> list[Any]:
        return list(refs)

    def lost(self) -> list[int]:
        return [0]

    def told(self, lost: list[int]) -> dict[int, Reach]:
        return {1: Reach(self.steps[-1] + 1, ())} if self.steps else {}

    def recall(self, told: Any, until: int | None) -> Any:
        """Nobody keeps what it had."""

    def hold(self, step: int | None) -> None:
        """Nor will."""

    def revive(self, lost: list[int]) -> None:
        self.total = -1000

    def wait(self) -> list[Any]:
        return []

    def become(self, roles: Any, calls: Any) -> None:
        self.total = 0


class FakePlan:
    names = ("run/host-0",)


class FakeEngine:
    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.plan = driver, FakePlan()


def recovering(driver: FakeDriver, **settings: Any) -> Recovery:
    engine: Any = FakeEngine(driver)
    return Recovery(engine, Settings(snapshot_every=10**6, **settings))


def test_a_loss_replays_the_steps_since_the_point_and_no_others() -> None:
    driver = FakeDriver(die_at={5})
    recovery = recovering(driver)
    for step in range(4):
        recovery.step(step, report=False)
    recovery.mark(4)
    for step in range(4, 8):
        recovery.step(step, report=False)
    assert driver.total == sum(range(8))
    assert driver.steps == [0, 1, 2, 3, 4, 4, 5, 6, 7] and recovery.replayed == 2


def test_without_a_point_everything_begins_anew() -> None:
    driver = FakeDriver(die_at={3})
    recovery = recovering(driver)
    for step in range(5):
        recovery.step(step, report=False)
    assert driver.total == sum(range(5)) and recovery.point == (0, None)


def test_an_action_is_done_again_after_a_loss() -> None:
    driver, tries = FakeDriver(), []
    recovery = recovering(driver)
    recovery.step(3, report=False)

    def action() -> int:
        tries.append(driver.total)
        if len(tries) == 1:
            raise ActorLost("killed")
        return driver.total

    assert recovery.guarded(action) == 3 and tries == [3, 3]


def test_too_many_losses_end_the_run_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    recovery = recovering(FakeDriver(die_at={1}), max_failures=0)
    recovery.step(0, report=False)
    with pytest.raises(TrainingError, match=r"lost run/host-0 \(killed\).*max_failures=0"):
        recovery.step(1, report=False)


def test_a_state_that_is_taken_up_is_the_point() -> None:
    driver = FakeDriver(die_at={7})
    recovery = recovering(driver)
    recovery.start_from(cast(Any, FakePoint(21)), 7)
    recovery.step(7, report=False)
    assert driver.total == 28 and recovery.point[0] == 7


@dataclass
class FakeSaving:
    step: int
    driver: FakeDriver
    begun: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self.begun.append(self.driver.total)

    def arrived(self, wait: bool) -> bool:
        return True


@pytest.mark.parametrize("lost_at", [3, 5])
def test_a_state_that_was_being_stored_is_stored_again(lost_at: int) -> None:
    driver = FakeDriver(die_at={lost_at})
    recovery = recovering(driver)
    for step in range(3):
        recovery.step(step, report=False)
    recovery.saving = saving = FakeSaving(3, driver)
    for step in range(3, 7):
        recovery.step(step, report=False)
    assert saving.begun == [0 + 1 + 2] and driver.total == sum(range(7))


def test_no_point_passes_a_state_that_is_being_stored() -> None:
    driver = FakeDriver()
    recovery = recovering(driver)
    recovery.settings.snapshot_every = 2
    recovery.saving = FakeSaving(3, driver)
    for step in range(8):
        recovery.step(step, report=False)
    assert recovery.point[0] == 2
    recovery.saving = None
    for step in range(8, 12):
        recovery.step(step, report=False)
    assert recovery.point[0] >= 8


@dataclass
class Twins(FakePoint):
    """Under way for ever, but one copy of everybody has told its state."""

    def arrived(self) -> bool:
        return False

    def without(self, lost: list[int], hosts: int) -> Any:
        return FakePoint(self.total)


class TwinDriver(FakeDriver):
    def snapshot(self, step: int, since: int) -> Any:
        return Twins(self.total)


def test_a_point_that_the_twins_have_counts_after_a_loss() -> None:
    driver = TwinDriver(die_at={3})
    recovery = recovering(driver)
    recovery.settings.snapshot_every = 1
    for step in range(6):
        recovery.step(step, report=False)
    assert driver.total == sum(range(6)) and recovery.replays == [1]


def test_no_point_of_twins_passes_a_state_that_is_being_stored() -> None:
    driver = TwinDriver(die_at={3})
    recovery = recovering(driver)
    recovery.settings.snapshot_every = 1
    recovery.saving = saving = FakeSaving(1, driver)
    for step in range(6):
        recovery.step(step, report=False)
    assert recovery.replays == [3] and saving.begun == [0]
    assert driver.total == sum(range(6))


class KeepingDriver(FakeDriver):
    """Somebody else has kept what it had before each step."""

    def recall(self, told: Any, until: int | None) -> Any:
        step = min(self.steps[-1], 10**6 if until is None else until)
        return step, FakePoint(sum(range(step)))


@pytest.mark.parametrize(("stored", "repeated"), [(None, 2), (3, 4)])
def test_what_others_have_kept_is_the_point(stored: int | None, repeated: int) -> None:
    """But no step behind a state that is being stored."""
    driver = KeepingDriver(die_at={6})
    recovery = recovering(driver)
    for step in range(3):
        recovery.step(step, report=False)
    if stored:
        recovery.saving = FakeSaving(stored, driver)
    for step in range(3, 8):
        recovery.step(step, report=False)
    assert driver.total == sum(range(8)) and recovery.replays == [repeated]
