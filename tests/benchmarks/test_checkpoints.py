"""bench checkpoint: a cost is beside the steps around it, so drift does not count."""

from __future__ import annotations

import pytest

from treeprop_ray.benchmarks.checkpoints import costs


def test_a_cost_is_beside_the_steps_before_and_after() -> None:
    plain = [[1.0, 1.0], [3.0, 3.0], [3.0, 3.0]]  # the machine slows down meanwhile
    assert costs(plain, [[2.0, 2.2], [3.3]]) == pytest.approx([0.05, 0.1])
