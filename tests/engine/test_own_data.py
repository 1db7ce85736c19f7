"""Own data on Ray: the same weights as in one process, also after a kill; what cannot travel."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conftest
import own_data
import pytest
import ray
import ray.data
import torch
from conftest import StopAt, Stopped, tiny_network
from own_data import WORDS, MapStyle, Noisy, Plain, Stateful, X, Y, rows
from ray import cloudpickle
from torch import Tensor
from torch.utils.data import DataLoader
from warm import warm_ray

from treeprop_ray import Callback, fit
from treeprop_ray.errors import TrainingError, UserError

for module in (own_data, conftest, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # actors cannot import the tests

RAY = {"engine": "ray", "placement": "packed", "hosts": 2, "cpus_per_actor": 0.5}
NAMED = {"columns": ("img", "label")}


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def trained(*data: Any, **words: Any) -> dict[str, Tensor]:
    return fit(tiny_network(4).float(), *data, **{**WORDS, **words}).network.state_dict()


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def ray_rows() -> Any:
    return ray.data.from_items(
        [{"img": x.numpy(), "label": int(y)} for x, y in zip(X, Y, strict=True)]
    )


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": (lambda: (X.numpy(), Y.numpy()), {}),
    "map-style": (Noisy, {}),
    "hugging-face": (rows, NAMED),
    "iterable": (Plain, {}),
    "stateful": (Stateful, {}),
    "loader": (lambda: DataLoader(Noisy(), 8, shuffle=True), {}),
    "hugging-face-stream": (lambda: rows().to_iterable_dataset(num_shards=2), NAMED),
    "shuffled-stream": (
        lambda: rows().to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=9), NAMED,
    ),
    "ray-data": (ray_rows, NAMED),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_own_data_trains_on_ray_as_in_one_process(kind: str) -> None:
    make, words = KINDS[kind]
    expected = trained(make(), validation=make(), **words)
    assert_same(trained(make(), validation=make(), **words, **RAY), expected)


@pytest.mark.parametrize("kind", ["map-style", "stateful"])
def test_a_stopped_run_goes_on_as_one_process_goes_through(kind: str, tmp_path: Path) -> None:
    make, words = KINDS[kind]
    expected = trained(make(), **words)
    words = {**words, "name": "r", "out": str(tmp_path), "checkpoint_every": 5, **RAY}
    with pytest.raises(Stopped):
        trained(make(), callbacks=[StopAt(8)], **words)
    assert_same(trained(make(), **words), expected)


class Kill(Callback):
    """kill -9 of some actors after some steps."""

    def __init__(self, blows: dict[int, str]) -> None:
        self.blows, self.point = blows, 0

    def on_step(self, run: Any, done: int) -> None:
        if done == 8:
            run.engine.recovery.guarded(lambda: run.engine.recovery.mark(8))
        if done in self.blows:
            run.engine.reports()
            for actor in ray._private.state.actors().values():
                if actor["State"] == "ALIVE" and actor["Name"].endswith(self.blows[done]):
                    os.kill(actor["Pid"], signal.SIGKILL)

    def on_end(self, run: Any, summary: dict[str, Any]) -> None:
        self.failures, self.point = run.engine.recovery.failures, run.engine.recovery.point[0]


@pytest.mark.parametrize(
    "kind",
    [
        "map-style",
        "stateful",
        *(
            pytest.param(k, marks=pytest.mark.long)
            for k in ("iterable", "loader", "shuffled-stream")
        ),
    ],
)
def test_killed_actors_do_not_change_the_weights(kind: str, cold_actors: None) -> None:
    """host-0 is the boundary, which reads; host-1 makes it go back to what it has in memory."""
    make, words = KINDS[kind]
    words = {**words, "steps": 16}
    expected = trained(make(), **words)
    kill = Kill({3: "host-0", 11: "host-1"})
    assert_same(trained(make(), snapshot_every=4, callbacks=[kill], **words, **RAY), expected)
    assert kill.failures >= 2 and kill.point > 4


def test_samples_travel_to_the_boundary_alone(tmp_path: Path, cold_actors: None) -> None:
    class Where(MapStyle):
        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            with contextlib.suppress(ValueError):  # no such actor in the driver
                name = ray.get_runtime_context().get_actor_name() or ""
                with self.file.open("a") as f:
                    f.write(name + "\n")

    data = Where()
    data.file = tmp_path / "names"
    trained(data, **RAY)
    names = data.file.read_text().split()
    assert {name.rpartition("/")[2] for name in names} == {"host-0"}


def test_what_cannot_travel_is_one_line() -> None:
    data = MapStyle()
    data.lock = threading.Lock()
    with pytest.raises(UserError, match="data: cannot be sent to the boundary actor") as caught:
        trained(data, **RAY)
    assert "\n" not in str(caught.value) and "engine=local" in str(caught.value)
    network = tiny_network(4).float()
    network.edges["1-2"].lock = threading.Lock()
    with pytest.raises(UserError, match=r"^part 1-2: cannot be sent to an actor: .*lock") as caught:
        fit(network, X, Y, **WORDS, **RAY)
    assert "\n" not in str(caught.value)


def test_metrics_stay_where_they_are() -> None:
    """Beside the driver: what they hold need not travel."""
    lock = threading.Lock()
    words = {"validation": (X, Y), "metrics": {"held": lambda outputs, _: lock.locked()}, **WORDS}
    scores = fit(tiny_network(4).float(), X, Y, **words, **RAY).scores
    assert scores["validation"]["full"]["held"] == 0


def test_a_sample_that_cannot_be_read_in_the_actor_is_one_line() -> None:
    class Torn(Plain):
        def __iter__(self) -> Any:
            yield from zip(X[:20], Y[:20], strict=True)
            raise OSError("the disk is gone")

    with pytest.raises((TrainingError, UserError), match="OSError: the disk is gone") as caught:
        trained(Torn(), **RAY)
    assert "\n" not in str(caught.value) and "batch of step 2" in str(caught.value)


def test_ray_data_beside_actors_that_take_all_cpus_is_one_line() -> None:
    with pytest.raises(UserError, match=r"cpus_per_actor=1: 2 actors take 2 of 2 CPUs; Ray Data"):
        trained(ray_rows(), **NAMED, **{**RAY, "cpus_per_actor": 1})
