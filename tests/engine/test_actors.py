"""The actor around a host: order, the first error, what it writes down."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from treeprop_ray.core.rule import HeldOut
from treeprop_ray.engine.actors import HostActor, Role
from treeprop_ray.errors import ActorLost, TrainingError
from treeprop_ray.hosts.base import StepReport
from treeprop_ray.schedule.ops import Call, Op


class Doubling:
    """A host that doubles what it is given, and breaks at a step."""

    at = ""

    def __init__(self, breaks: int = 999) -> None:
        self.breaks, self.applied = breaks, []

    def begin(self, call: Call) -> None:
        if call.level == self.breaks:
            raise ValueError("what was left broke")

    def run(self, call: Call, piece: Any, inputs: Any) -> Any:
        if piece.step == self.breaks:
            raise ValueError("the block broke")
        return {"out": 2 * inputs["x"]}

    def report(self, step: int, norms: bool) -> StepReport:
        return StepReport(square_norms={"a": 1.0})

    def apply(self, step: int, square_norms: Any) -> None:
        self.applied.append((step, square_norms))


CALL = Call("forward", 2, 0, 0, (Op("lift", 6, ("x",), ("out",)),), ("x",), (("out",),), True)


def actor(breaks: int = 999) -> HostActor:
    role = Role("r/host-0", "node 6", lambda: Doubling(breaks), (CALL,), 4, 1, keep_spans=9)
    return HostActor(role)


def packet() -> dict[str, Any]:
    return {"x": torch.ones(2).numpy()}


def test_a_call_gives_its_packets_and_is_written_down() -> None:
    mine = actor()
    assert mine.run(0, 5, packet())["out"].tolist() == [2, 2]
    busy, sent, spans = mine.usage()
    assert (
        sent == 8
        and busy >= 0
        and [(s.phase, s.level, s.step) for s in spans] == [("forward", 2, 5)]
    )
    assert mine.usage()[1] == 0  # since the last question


def test_what_a_call_begins_with_may_be_done_before_its_inputs_are_there() -> None:
    mine = actor()
    mine.prepare(CALL, 5)
    busy, sent, spans = mine.usage()
    assert busy >= 0 and (sent, spans) == (0, [])
    mine = actor(breaks=CALL.level)
    with pytest.raises(TrainingError, match="actor r/host-0, step 5: ValueError: what was left"):
        mine.prepare(CALL, 5)
    with pytest.raises(TrainingError, match="what was left"):
        mine.run(0, 6, packet())


def test_the_pace_is_the_mean_time_of_training_calls() -> None:
    mine = actor()
    assert mine.pace() == 0
    mine.run(0, HeldOut(0), packet())
    assert mine.calls == 0
    mine.run(0, 5, packet())
    assert mine.calls == 1 and mine.pace() == mine.seconds >= 0


def test_a_probe_leaves_no_trace_in_the_timeline() -> None:
    mine = actor()
    mine.run(0, HeldOut(0), packet())
    assert mine.usage()[1:] == (0, [])


def test_the_first_error_is_the_one_to_show() -> None:
    mine = actor(breaks=3)
    for step in (3, 4):
        with pytest.raises(TrainingError, match="node 6, level 2, step 3: ValueError: the block"):
            mine.run(0, step, packet())
    with pytest.raises(TrainingError, match="step 3"):
        mine.report(4, True)
    mine.apply(4, None)  # after a failed report nothing is updated
    assert mine.host.applied == []  # type: ignore[attr-defined]


def test_an_update_with_clipping_sees_the_norms_of_all() -> None:
    mine = actor()
    mine.report(0, True)
    mine.apply(0, None, StepReport(square_norms={"b": 2.0}))
    assert mine.host.applied == [(0, [{"a": 1.0}, {"b": 2.0}])]  # type: ignore[attr-defined]
    mine.apply(1, None)  # Ray does not run a report whose inputs are lost
    assert len(mine.host.applied) == 1 and mine.done == 1  # type: ignore[attr-defined]


def test_who_has_missed_a_call_does_not_go_on() -> None:
    """Ray leaves out a call whose inputs are lost, and would run the next one."""
    role = Role("r/host-0", "node 6", Doubling, (CALL,) * 4, 4, 1, starts=(0, 3))
    mine = HostActor(role)
    for index in (0, 1, 2, 3, 0):
        mine.run(index, 5, packet())
    with pytest.raises(ActorLost, match="actor r/host-0: a call of step 5 never came"):
        mine.run(2, 5, packet())
    with pytest.raises(ActorLost):
        mine.report(5, True)
