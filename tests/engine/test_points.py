"""Recovery points: who keeps whose state, and what is read when some of it is gone."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.exceptions import ObjectLostError
from warm import warm_ray

from treeprop_ray.engine import runtime
from treeprop_ray.engine.points import Point, keepers
from treeprop_ray.hosts.base import State


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def test_our_own_ray_remembers_a_bounded_number_of_tasks(local_ray: None) -> None:
    """Its control store grows with every task that it remembers."""
    node = ray._private.worker._global_node
    (gcs,) = node.all_processes["gcs_server"]
    command = Path(f"/proc/{gcs.process.pid}/cmdline").read_text().split("\0")
    (given,) = (w.partition("=")[2] for w in command if w.startswith("--config_list="))
    assert json.loads(b64decode(given))["task_events_max_num_task_in_gcs"] == runtime.TASK_EVENTS


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


@ray.remote
def gone() -> None:
    """As `ray.get` says it of a tensor whose machine is lost."""
    raise ObjectLostError("00" * 28, b"", "")


@pytest.mark.parametrize("index", [0, 1])
def test_who_lost_its_state_takes_its_twins(local_ray: None, index: int) -> None:
    """Also where a part has no weights, so that no state tells of it."""
    state: State = ({"0-1/weight": torch.ones(4)}, {"0-1/weight/m": torch.zeros(3)})
    own, twin = (Point.of(state) for _ in range(2))
    names, lost = [*own.names, *twin.names], gone.remote()
    weights, optimizer = Point(names, [lost, *twin.states], whole=True).state_of(
        ["stem", "0-1"], index
    )
    assert weights["0-1/weight"].sum() == 4 and list(optimizer) == ["0-1/weight/m"]
    with pytest.raises(ObjectLostError):
        Point(names, [lost, lost], whole=True).state_of(["stem", "0-1"], index)
