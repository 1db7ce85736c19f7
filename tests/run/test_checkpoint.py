"""Checkpoints: whole or absent, checked, on any storage; a bad one is named and never believed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import Result, StopAt
from fsspec.implementations.memory import MemoryFileSystem

from treeprop_ray import config
from treeprop_ray.errors import TrainingError
from treeprop_ray.run import checkpoint
from treeprop_ray.run.folder import RunFolder
from treeprop_ray.run.trainer import Trainer

Command = Callable[..., Result]
SMALL = ["model.hidden=12", "model.blocks=4", "batch=64", "steps=12", "checkpoint_every=3",
         "keep_last=3", "keep_best=false", "name=r"]  # fmt: skip


class Limited(MemoryFileSystem):
    """Memory that takes `room` more bytes; 0 is a read-only one."""

    protocol = "limited"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    room = 10**9

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._take(len(value))
        super().pipe_file(path, value, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._take(os.path.getsize(lpath))
        super().put_file(lpath, rpath, **kwargs)

    @classmethod
    def _take(cls, size: int) -> None:
        if cls.room == 0:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if size > cls.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        cls.room -= size


fsspec.register_implementation("limited", Limited, clobber=True)


@pytest.fixture
def limited() -> Iterator[type[Limited]]:
    yield Limited
    Limited.store.clear()
    Limited.room = 10**9


def state(value: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"0-1/w": torch.full((4, 4), value)}, {"0-1/w/exp_avg": torch.full((4, 4), -value)}


def meta(step: int) -> dict[str, Any]:
    best = {"accuracy": 0.5, "step": step}
    return {"step": step, "epoch": 0, "seed": 1, "N": 2, "split": "floor", "best": best,
            "wall_seconds": 1.0}  # fmt: skip


def three(place: str | Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(place, *state(step), meta(step))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("file", [*checkpoint.FILES, "manifest.json"])
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink, lambda path: path.write_text("{}")])
def test_a_harmed_file_is_named_and_the_one_before_is_taken(
    tmp_path: Path, file: str, harm: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    three(tmp_path)
    harm(tmp_path / "step-00000003" / file)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.meta["step"] == 2
    assert torch.equal(found.weights["0-1/w"], torch.full((4, 4), 2.0))
    (line,) = capsys.readouterr().err.splitlines()
    assert "skipping damaged checkpoint" in line and "step-00000003" in line


def test_foreign_folders_are_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program's files, a renamed checkpoint, a pickle in the place of weights."""
    three(tmp_path)
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "model.pt").write_bytes(b"not ours")
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000007")
    other = tmp_path / "step-00000008"
    shutil.copytree(tmp_path / "step-00000003", other)
    torch.save({"w": torch.ones(2)}, other / "weights.safetensors")
    (other / "manifest.json").write_text(
        json.dumps({f: checkpoint.sha256(other / f) for f in checkpoint.FILES})
    )
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.meta["step"] == 3
    assert [int(line.partition("step-")[2][:8]) for line in capsys.readouterr().err.splitlines()] \
        == [9, 8, 7]  # fmt: skip


@pytest.mark.parametrize("scheme", ["memory://ckpt", "file://", "limited://ckpt"])
def test_any_fsspec_url_holds_checkpoints(
    scheme: str, tmp_path: Path, limited: type[Limited]
) -> None:
    place = scheme + (str(tmp_path) if scheme == "file://" else "")
    three(place)
    assert checkpoint.steps(place) == [1, 2, 3]
    found = checkpoint.newest(place)
    assert found is not None and found.path.endswith("step-00000003")
    assert torch.equal(found.optimizer["0-1/w/exp_avg"], torch.full((4, 4), -3.0))
    checkpoint.prune(place, 3, keep_last=1, best=1)
    assert checkpoint.steps(place) == [1, 3]


def test_a_damaged_later_checkpoint_does_not_crowd_out_whole_ones(tmp_path: Path) -> None:
    three(tmp_path)
    flip(tmp_path / "step-00000003" / "meta.json")
    checkpoint.prune(tmp_path, 2, keep_last=1, best=None)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.meta["step"] == 2


def test_a_run_with_storage_resumes_evaluates_and_starts_anew(
    command: Command, tmp_path: Path
) -> None:
    url = "memory://runs"
    words = [*SMALL, f"out={tmp_path}", f"storage={url}"]
    assert command("train", *words, "steps=6").code == 0
    assert not (tmp_path / "r" / "checkpoints").exists()
    again = command("train", *words)
    assert again.code == 0 and "continuing from memory://runs/r/step-00000006" in again.out
    assert checkpoint.steps(f"{url}/r") == [6, 9, 12]
    evaluated = command("evaluate", f"run={tmp_path / 'r'}", "path=full")
    assert evaluated.code == 0 and "memory://runs/r/step-00000012" in evaluated.out
    elsewhere = command("train", *words, f"storage={tmp_path / 'other'}")
    assert elsewhere.code == 2 and "storage" in elsewhere.err
    assert command("train", *words, "steps=3", "fresh=true").code == 0
    assert checkpoint.steps(f"{url}/r") == [3]


@pytest.mark.parametrize(
    ("url", "part"),
    [("nowhere://x", "nowhere"), ("s3://bucket", "s3fs"), ("limited://x", "Read-only")],
)
def test_storage_that_cannot_be_used_is_bad_input(
    command: Command, tmp_path: Path, limited: type[Limited], url: str, part: str
) -> None:
    if part == "s3fs":
        try:
            import s3fs  # noqa: F401  # type: ignore[import-not-found]
        except ImportError:
            pass
        else:
            pytest.skip("s3fs is installed")
    limited.room = 0
    result = command("train", *SMALL, f"out={tmp_path / 'runs'}", f"storage={url}")
    assert result.code == 2 and len(result.error_lines) == 1
    assert f"storage={url}" in result.err and part in result.err
    assert not (tmp_path / "runs").exists()


def test_an_out_that_cannot_be_written_is_bad_input(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = command("train", *SMALL, f"out={tmp_path / 'file'}")
    assert result.code == 2 and len(result.error_lines) == 1
    assert f"out={tmp_path / 'file'}: cannot write there" in result.err


def test_a_full_target_stops_the_run_and_leaves_earlier_checkpoints_whole(
    command: Command, tmp_path: Path, limited: type[Limited]
) -> None:
    words = [*SMALL, f"out={tmp_path}", "storage=limited://runs"]
    limited.room = 70_000  # not enough for four checkpoints
    result = command("train", *words)
    assert result.code == 1 and len(result.error_lines) == 1, result.err
    assert "No space left on device" in result.err
    kept = checkpoint.steps("limited://runs/r")
    assert kept and kept[-1] < 12 and "Traceback" not in result.err
    assert f"last checkpoint: limited://runs/r/step-{kept[-1]:08d}" in result.err
    for step in kept:
        checkpoint.load("limited://runs/r", step)
    limited.room = 10**9
    again = command("train", *words)
    assert again.code == 0 and f"(step {kept[-1]} of 12)" in again.out


def test_a_checkpoint_of_another_network_is_bad_input(command: Command, tmp_path: Path) -> None:
    command("train", *SMALL, f"out={tmp_path / 'a'}")
    kept = tmp_path / "a" / "r" / "checkpoints"
    for other, part in (
        (["model.blocks=3"], "N=5 split=floor, this run has N=4"),
        (["model.hidden=8"], "model.hidden: 12 there, 8 here"),
        (["split=right_full"], "split=floor, this run has N=5 split=right_full"),
    ):
        words = [*SMALL, *other, f"out={tmp_path / 'b'}", f"name={other[0].partition('=')[2]}"]
        folder = RunFolder(config.load(words))
        folder.open()
        folder.release()
        shutil.copytree(kept / "step-00000012", folder.path / "checkpoints" / "step-00000012")
        result = command("train", *words)
        assert result.code == 2 and len(result.error_lines) == 1 and part in result.err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> checkpoint.Checkpoint:
    """The last checkpoint of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    Trainer.of(config.load([*SMALL, f"out={folder}", "steps=18"])).train()
    return checkpoint.load(folder / "r" / "checkpoints", 18)


KILLED = """
import os, signal, sys
from pathlib import Path
from treeprop_ray import train
from treeprop_ray.core import tensor_file
from treeprop_ray.run import checkpoint
from treeprop_ray.run import storage
moment, words = sys.argv[1], sys.argv[2:]
def die(): os.kill(os.getpid(), signal.SIGKILL)
count = 0
def watch(module, name, at):
    real = getattr(module, name)
    def wrapped(*args, **kwargs):
        global count
        if moment == at:
            count += 1
            if count == 5: die()
        return real(*args, **kwargs)
    setattr(module, name, wrapped)
watch(tensor_file, "save", "weights")
watch(os, "rename", "rename")
train.main(words)
"""


@pytest.mark.parametrize("moment", ["weights", "rename"])
def test_a_driver_killed_while_it_writes_continues_from_the_one_before(
    moment: str, tmp_path: Path, command: Command, whole: checkpoint.Checkpoint
) -> None:
    words = [*SMALL, f"out={tmp_path}", "steps=18"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, moment, *words], capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "r" / "checkpoints"
    left = list(folder.glob(".step-*.tmp"))
    assert left, "it was killed while a checkpoint lay aside, half written"
    before = checkpoint.steps(folder)
    assert before == {"weights": [3, 6], "rename": [6, 9, 12]}[moment]
    for step in before:
        checkpoint.load(folder, step)
    again = command("train", *words)
    assert again.code == 0 and f"(step {before[-1]} of 18)" in again.out
    assert not list(folder.glob(".step-*.tmp"))
    mine = checkpoint.load(folder, 18)
    for found, expected in ((mine.weights, whole.weights), (mine.optimizer, whole.optimizer)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], v) for k, v in expected.items())


def test_a_clean_stop_names_the_last_checkpoint(tmp_path: Path) -> None:
    burns = StopAt(8, TrainingError("the machine room burns"))
    with pytest.raises(TrainingError) as caught:
        Trainer.of(config.load([*SMALL, f"out={tmp_path}"]), callbacks=[burns]).train()
    last = tmp_path / "r" / "checkpoints" / "step-00000006"
    assert str(caught.value) == f"the machine room burns; last checkpoint: {last}"
