"""Recovery points: who keeps whose state."""

from __future__ import annotations

import pytest

from treeprop_ray.engine.points import keepers


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ("a", [None]),
        ("aaa", [None, None, None]),
        ("ab", [1, 0]),
        ("aab", [2, 2, 0]),
        ("abba", [1, 3, 3, 1]),
        ("abc", [1, 2, 0]),
    ],
)
def test_the_next_actor_on_another_machine_keeps_a_state(
    machines: str, expected: list[int | None]
) -> None:
    assert keepers(list(machines)) == expected
