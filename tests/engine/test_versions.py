"""What actors keep of their last steps, and where all can go back to."""

from __future__ import annotations

import torch
from torch import Tensor

from treeprop_ray.engine.versions import Reach, Versions, begun, common
from treeprop_ray.hosts.base import State


def state(number: float) -> State:
    return {"0-1/weight": torch.full((3,), number)}, {"0-1/weight/step": torch.tensor(number)}


def stands(number: int) -> dict[str, Tensor]:
    return {"data/stream/state": torch.tensor(number)}


def test_a_version_is_the_state_before_a_step_and_the_stream_before_its_batch() -> None:
    live, versions = state(4), Versions(2, 4, stands(40))
    for step in (4, 5, 6):
        versions.keep(step, live)
        for part in live:
            for t in part.values():
                t += 1
        versions.ended(step, stands(10 * step + 10))
    assert list(versions.states) == [5, 6]
    for step in (5, 6, 7):  # 7 is now
        weights, slots = versions.before(step, lambda: live)
        assert weights["0-1/weight"].tolist() == [step] * 3
        assert slots["0-1/weight/step"] == step and slots["data/stream/state"] == 10 * step


def test_the_version_of_a_checkpoint_under_way_stays() -> None:
    versions = Versions(2)
    for step in range(9):
        if step in (3, 7):
            versions.held = 3 if step == 3 else None
        versions.keep(step, state(step))
        versions.ended(step, stands(step + 1))
        if step == 6:
            assert list(versions.states) == [3, 5, 6]
            assert versions.before(3, lambda: state(0))[1]["data/stream/state"] == 3
    assert list(versions.states) == [7, 8] and 3 not in versions.stood


def test_memory_is_used_again_where_a_tensor_is_like_the_one_before() -> None:
    versions = Versions(1)
    versions.keep(0, state(0))
    first = versions.states[0][0]["0-1/weight"]
    versions.keep(1, state(1))
    assert versions.states[1][0]["0-1/weight"] is first
    versions.keep(2, ({"0-1/weight": torch.ones(2)}, {}))
    assert len(versions.states[2][0]["0-1/weight"]) == 2 and first.tolist() == [1] * 3


def test_all_go_back_to_the_newest_step_that_some_copy_of_every_host_has() -> None:
    ahead, behind = Reach(8, (5, 6, 7, 8)), Reach(7, (4, 5, 6, 7))
    assert common({0: ahead, 2: behind, 3: behind}, hosts=2, until=None) == 7
    assert common({0: ahead, 1: ahead, 2: behind, 3: behind}, hosts=2, until=None) == 8
    assert common({0: ahead, 3: behind}, hosts=2, until=5) == 5
    assert common({0: ahead, 3: behind}, hosts=2, until=3) is None
    assert common({0: ahead, 2: ahead}, hosts=2, until=None) is None  # nobody has host 1
    assert list(begun({0: ahead, 3: behind})) == list(range(9)) and not begun({})


def test_with_shards_the_slots_of_every_copy_are_needed() -> None:
    """Two hosts, three copies: actors 0 2 4 are copies of one host, 1 3 5 of the other."""
    both = Reach(7, (6, 7), (6, 7))
    late = Reach(7, (6, 7), (6,))  # the copy before it was lost before it told
    assert common(dict.fromkeys((0, 1, 2, 3, 5), both), 2, None, actors=6) == 7  # 0 has those of 4
    assert common({0: late, **dict.fromkeys((1, 2, 3, 5), both)}, 2, None, actors=6) == 6
    assert common(dict.fromkeys((0, 1, 3, 5), both), 2, None, actors=6) is None  # 2's were with 4
    versions = Versions(2, 6)
    for step in (6, 7):
        versions.keep(step, state(step))
        versions.ended(step, {})
        versions.foster(step, {"0-1/bias/step": torch.tensor(step)})
    assert versions.before(7, lambda: state(0))[1]["0-1/bias/step"] == 6
