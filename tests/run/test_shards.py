"""Checkpoints that every actor writes and reads for itself."""

from __future__ import annotations

import copy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine_of
from in_process import InProcess

from treeprop_ray import config, data, methods
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import TrainingError
from treeprop_ray.run import checkpoint, pace, shards, trainer
from treeprop_ray.run.initial import source_of
from treeprop_ray.run.reading import open_run
from treeprop_ray.run.storage import Disk, Storage, storage_at
from treeprop_ray.run.tensors import Tensors
from treeprop_ray.run.trainer import Trainer

WORDS = ["model.blocks=4", "model.hidden=4", "batch=8", "data.limit=100"]
META = {"step": 2, "epoch": 0, "N": 5, "split": "floor", "best": {}, "wall_seconds": 1.0}
MARKS = {"run": "a", "settings": "b"}


def crew_of(*words: str) -> InProcess:
    """After two steps."""
    more = ["engine=ray", "placement=packed", *words]
    settings = methods.checked(config.load([*WORDS, *more]))
    crew = InProcess(methods.job_of(settings, data.load(settings), 20))
    for step in range(2):
        crew.step(step, report=True)
    return crew


def saved(crew: InProcess, storage: Storage) -> checkpoint.Checkpoint:
    saving = shards.Saving(crew, storage, META, MARKS)
    assert saving.arrived(wait=True)
    saving.commit()
    return checkpoint.load(storage, 2)


def assert_same(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())


@pytest.mark.parametrize("place", ["disk", "memory://shards/run"])
@pytest.mark.parametrize(
    "words", [["hosts=3"], ["hosts=2", "replicas=2", "shard_optimizer=true"]], ids=str
)
def test_parts_of_all_actors_are_one_checkpoint(
    tmp_path: Path, place: str, words: list[str]
) -> None:
    storage = storage_at(tmp_path if place == "disk" else place)
    storage.prepare()
    crew = crew_of(*words)
    point = saved(crew, storage)
    assert_same((point.weights, point.optimizer), crew.state())
    assert point.manifest["run"] == "a"
    fresh = engine_of(config.load(WORDS), data.load(config.load(WORDS)), 20)
    fresh.load((dict(point.weights), dict(point.optimizer)), 2)
    other = crew_of("hosts=1")
    other.take_up(partial(shards.read_own, storage, 2), 2)
    for some in (fresh, other):
        assert_same(some.state(), crew.state())


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    crew = crew_of("hosts=2", "replicas=2", "shard_optimizer=true")
    expected = copy.deepcopy(crew.state())
    saving = shards.Saving(crew, Disk(tmp_path), META, MARKS)
    assert checkpoint.steps(tmp_path) == []
    crew.step(2, report=True)
    assert saving.arrived(wait=True)
    assert checkpoint.newest(tmp_path) is None  # not before it is committed
    saving.commit()
    point = checkpoint.load(tmp_path, 2)
    assert_same((point.weights, point.optimizer), expected)


def test_who_waits_is_not_kept_waiting_and_what_is_begun_again_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "SHARE", 1e-9)  # alone, the writer would take years
    crew = crew_of("hosts=2")
    saving = shards.Saving(crew, Disk(tmp_path), META, MARKS)
    assert not saving.arrived(wait=False)
    crew.step(2, report=True)
    expected = copy.deepcopy(crew.state())
    saving.begin()  # somebody was lost
    assert not saving.arrived(wait=False) and checkpoint.steps(tmp_path) == []
    assert saving.arrived(wait=True)
    saving.commit()
    point = checkpoint.load(tmp_path, 2)
    assert_same((point.weights, point.optimizer), expected)


def test_a_host_reads_what_it_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = crew_of("hosts=3")
    saved(crew, Disk(tmp_path))
    read: list[str] = []
    plain = Tensors.__getitem__
    monkeypatch.setattr(Tensors, "__getitem__", lambda t, key: (read.append(key), plain(t, key))[1])
    shards.read_own(Disk(tmp_path), 2, crew.hosts[1])
    assert {key.partition("/")[0] for key in read} == crew.hosts[1].parts.keys()


class Broken(Disk):
    """A folder that cannot even be looked at."""

    def sees(self, name: str, token: str) -> bool:
        raise OSError("stale file handle")


def test_an_actor_that_cannot_begin_says_why(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="stale file handle"):
        shards.Saving(crew_of("hosts=2"), Broken(tmp_path), META, MARKS)


class Elsewhere(Disk):
    """A folder that actors do not see."""

    def sees(self, name: str, token: str) -> bool:
        return False


def test_an_actor_that_does_not_see_the_folder_hands_its_part_over(tmp_path: Path) -> None:
    crew = crew_of("hosts=2")
    point = saved(crew, Elsewhere(tmp_path))
    assert_same((point.weights, point.optimizer), crew.state())


def test_a_part_that_is_missing_or_harmed_is_named(tmp_path: Path) -> None:
    saved(crew_of("hosts=2"), Disk(tmp_path))
    part = tmp_path / "step-00000002" / "weights-00001.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"weights-00001.*checksum"):
        checkpoint.load(tmp_path, 2)
    part.unlink()
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"weights-00001.* is missing"):
        checkpoint.load(tmp_path, 2)


def test_a_part_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    crew = crew_of("hosts=2")
    saving = shards.Saving(crew, Elsewhere(tmp_path), META, MARKS)
    for path in tmp_path.glob(".step*"):
        for token in path.iterdir():
            token.unlink()
        path.rmdir()
    with pytest.raises(TrainingError, match=r"cannot write checkpoint .*step-00000002"):
        saving.arrived(wait=True)


def test_the_checkpoint_of_another_run_is_left_alone(tmp_path: Path) -> None:
    crew = crew_of("hosts=2")
    saved(crew, Disk(tmp_path))
    with pytest.raises(TrainingError, match="is of another run"):
        shards.Saving(crew, Disk(tmp_path), META, {"run": "x", "settings": "y"})


def train(name: str, out: Path, *words: str) -> dict[str, Any]:
    small = ["steps=6", "checkpoint_every=2", "keep_last=9", "keep_best=false", "log_every=1"]
    settings = config.load([*WORDS, *small, f"out={out}", f"name={name}", *words])
    return Trainer.of(methods.checked(settings)).train()


def test_a_run_of_actors_is_written_taken_up_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer over hosts that write themselves; what it leaves is that of one process."""
    summary = train("alone", tmp_path, "microbatches=2")
    alone = checkpoint.load(tmp_path / "alone" / "checkpoints", 6)
    monkeypatch.setattr(trainer, "build", lambda job, way_on: InProcess(job))
    monkeypatch.setattr(InProcess, "state", lambda _: pytest.fail("all of it in one process"))
    actors = ["engine=ray", "placement=packed", "hosts=2", "replicas=2", "timeline_steps=0"]
    told = train("many", tmp_path, *actors)
    folder = tmp_path / "many" / "checkpoints"
    assert checkpoint.steps(folder) == [2, 4, 6]
    for key in ("final", "parameters_trained", "parameters_deployed"):
        assert told[key] == summary[key]
    for step in (4, 6):
        shutil.rmtree(folder / checkpoint.name_of(step))
    (tmp_path / "many" / "summary.json").unlink()
    train("many", tmp_path, *actors, "hosts=1")
    many = checkpoint.load(folder, 6)
    assert len(list(Path(many.path).glob("weights-*"))) == 1
    assert_same((many.weights, many.optimizer), (alone.weights, alone.optimizer))
    _, _, _, network = open_run(str(tmp_path / "many"), "last", None)
    _, _, _, other = open_run(str(tmp_path / "alone"), "last", None)
    assert_same((network.state_dict(),), (other.state_dict(),))
    settings = config.load(WORDS)
    begun = source_of(str(tmp_path / "many"), methods.job_of(settings, data.load(settings), 20))
    keys, _ = begun.contents(Tree(5))
    assert keys.keys() == {key.partition("/")[0] for key in alone.weights}
