"""Damaged, foreign and full storage: one line, nothing lost, nothing of others deleted."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Result, StopAt, Stopped
from safetensors.torch import load_file, save_file

from treeprop_ray import config
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.run import checkpoint, files, metrics
from treeprop_ray.run.folder import read_summary
from treeprop_ray.run.loggers import Besides, TensorBoard
from treeprop_ray.run.storage import Disk
from treeprop_ray.run.trainer import Trainer
from treeprop_ray.sweep import rows

Command = Callable[..., Result]
SMALL = ["model.hidden=8", "model.blocks=3", "batch=128", "steps=6", "checkpoint_every=2",
         "keep_last=3", "keep_best=false", "name=r", "loggers=[]"]  # fmt: skip
CSV = "loggers=[csv]"  # and figures, which take most of the time of a small run


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    Trainer.of(config.load([*SMALL, CSV, f"out={folder}", "steps=4"])).train()
    return folder


# -- checkpoints of others ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "told"),
    [("seed=2", "seed: 1 there, 2 here"), ("lr=0.5", "there, 0.5 here"),
     ("objective=final_ce", "there, final_ce here")],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_neither_taken_nor_deleted(
    trained: Path, command: Command, tmp_path: Path, word: str, told: str
) -> None:
    """Storage and name agree, the settings do not."""
    shared = [*SMALL, f"storage={tmp_path / 'shared'}"]
    shutil.copytree(trained / "r/checkpoints", tmp_path / "shared/r")
    before = tree(tmp_path / "shared")
    for more in ([], ["fresh=true"]):
        result = command("train", *shared, f"out={tmp_path / 'b'}", word, *more)
        assert result.code == 2 and len(result.error_lines) == 1, result.err
        assert "is of another run" in result.err and (more or told in result.err)
        assert tree(tmp_path / "shared") == before


def test_a_lost_folder_is_made_again_from_its_storage(command: Command, tmp_path: Path) -> None:
    words = [*SMALL, f"storage={tmp_path / 'shared'}", f"out={tmp_path / 'a'}"]
    assert command("train", *words, "steps=4").code == 0
    shutil.rmtree(tmp_path / "a")
    again = command("train", *words)
    assert again.code == 0 and "(step 4 of 6)" in again.out
    marks = {json.loads(p.read_text())["run"] for p in tmp_path.rglob("manifest.json")}
    assert marks == {json.loads((tmp_path / "a" / "r" / "run.json").read_text())["id"]}
    assert command("train", *words, "fresh=true", "steps=2").code == 0
    assert checkpoint.steps(tmp_path / "shared" / "r") == [2]


def test_two_runs_with_one_storage_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """Both began before either had a checkpoint."""
    state = {"0-1/w": torch.ones(2)}, {}
    meta = {"step": 1, "epoch": 0, "N": 2, "split": "floor", "best": {}, "wall_seconds": 1.0}
    theirs, ours = {"run": "a", "settings": "x"}, {"run": "b", "settings": "y"}
    checkpoint.save(tmp_path, *state, meta, theirs)
    with pytest.raises(TrainingError, match="is of another run"):
        checkpoint.save(tmp_path, *state, meta, ours)
    checkpoint.save(tmp_path, *state, {**meta, "step": 2}, ours)
    checkpoint.prune(tmp_path, 2, 1, None, ours)
    assert checkpoint.steps(tmp_path) == [1, 2]


# -- damaged files --------------------------------------------------------------------------------


def rewrite(step: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
            file: str = "optimizer.safetensors") -> None:  # fmt: skip
    """Change a file and make its checksum right again."""
    save_file(change(load_file(step / file)), step / file)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest[file] = hashlib.sha256((step / file).read_bytes()).hexdigest()
    (step / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda t: {}, "optimizer.safetensors"),
        (lambda t: dict(list(t.items())[1:]), "optimizer.safetensors"),
        (lambda t: t | {"9-9/w/exp_avg": torch.ones(2)}, "optimizer.safetensors"),
        (lambda t: {k: v.double() for k, v in t.items()}, "optimizer.safetensors"),
        (lambda t: {k: v.half() for k, v in t.items()}, "weights.safetensors"),
        (lambda t: t | {"9-9/w": torch.ones(2)}, "weights.safetensors"),
    ],
    ids=["empty", "partial", "extra slot", "slots of another dtype", "dtype", "extra weight"],
)  # fmt: skip
def test_a_state_that_is_not_the_one_that_was_written_is_refused(
    trained: Path, tmp_path: Path, command: Command, change: Any, file: str
) -> None:
    shutil.copytree(trained, tmp_path / "runs")
    rewrite(tmp_path / "runs/r/checkpoints/step-00000004", change, file)
    result = command("train", *SMALL, f"out={tmp_path / 'runs'}")
    assert len(result.error_lines) == 1, result.err
    if result.code == 0:
        assert "skipping damaged checkpoint" in result.err and "(step 2 of 6)" in result.out
    else:
        assert result.code == 2 and "step-00000004: is of another" in result.err


def test_a_name_that_is_no_number_is_no_checkpoint(
    trained: Path, tmp_path: Path, command: Command
) -> None:
    shutil.copytree(trained, tmp_path / "runs")
    (tmp_path / "runs/r/checkpoints/step-²").mkdir()
    assert command("train", *SMALL, f"out={tmp_path / 'runs'}").code == 0
    result = command("evaluate", f"run={tmp_path / 'runs/r'}", "checkpoint=²")
    assert result.code == 2 and "last, best or a step number" in result.err


def test_a_torn_config_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    files.write_whole(path, "seed: 1\n")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        files.write_whole(path, "seed: 2\n")
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    assert path.read_text() == "seed: 1\n"


@pytest.mark.parametrize(
    "harm",
    [
        lambda raw: raw[:-9],
        lambda raw: raw[: len(raw) // 2] + b"\0\xff\xfe\n" + raw[len(raw) // 2 :],
        lambda raw: b"",
        lambda raw: b"\xff\xfe" * 50,
        lambda raw: raw + b"step,\xc2\xb2,1\r\n",
    ],
    ids=["torn", "zeros", "empty", "noise", "no number"],
)
def test_a_torn_metrics_file_does_not_end_the_run(
    trained: Path, tmp_path: Path, command: Command, harm: Callable[[bytes], bytes]
) -> None:
    shutil.copytree(trained, tmp_path / "runs")
    path = tmp_path / "runs/r/metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(harm(whole))
    result = command("train", *SMALL, CSV, f"out={tmp_path / 'runs'}", "log_every=1")
    assert result.code == 0 and len(result.error_lines) <= 1, result.err
    assert "damaged" in result.err or harm(whole) == b""
    assert metrics.read_rows(path)[-1]["step"] == "6"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"steps": "many"}', "\0"])
def test_a_damaged_summary_is_one_line_and_is_made_again(
    trained: Path, tmp_path: Path, command: Command, text: str
) -> None:
    shutil.copytree(trained, tmp_path / "runs")
    run = tmp_path / "runs/r"
    (run / "summary.json").write_text(text)
    for name, words in {
        "report": [f"run={run}"],
        "compare": [f"runs=[{run}]", f"to={tmp_path / 'table'}"],
    }.items():
        result = command(name, *words)
        assert result.code == 2 and len(result.error_lines) == 1, (name, result.err)
        assert "summary.json: is damaged" in result.err
    result = command("train", *SMALL, f"out={tmp_path / 'runs'}", "steps=4")
    assert result.code == 0 and result.error_lines[0].endswith("it is made again")
    assert read_summary(run)["steps"] == 4


@pytest.mark.parametrize("text", ["{", '{"commands": 3}', '{"commands": [1]}', "[]"])
def test_a_damaged_log_of_commands_is_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "commands.json").write_text(text)
    try:
        assert rows.command_log(tmp_path) == []
    except UserError as e:
        assert "commands.json: is damaged" in str(e)
    assert len(capsys.readouterr().err.splitlines()) <= 1


# -- full disks -----------------------------------------------------------------------------------


class Full:
    """A file on a disk that is full for a while."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 10**9

    def write(self, data: bytes) -> int:
        return int(self.file.write(data[: self.room]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_leaves_whole_rows_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = metrics.MetricsFile(tmp_path / "metrics.csv", ["step", "loss"], 0)
    disk: Any = Full(file._file)
    file._file = disk
    file.write({"step": 1, "loss": 0.5})
    disk.room = 3
    file.write({"step": 2, "loss": 0.25})
    file.write({"step": 3, "loss": 0.25})
    disk.room = 10**9
    file.write({"step": 4, "loss": 0.125})
    file.close()
    assert [row["step"] for row in metrics.read_rows(tmp_path / "metrics.csv")] == ["1", "4"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "metrics.csv: No space left on device" in line and "step 2" in line


def test_a_logger_that_fails_does_not_end_the_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, run: Any, row: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TensorBoard, "on_row", full)
    words = [*SMALL, f"out={tmp_path}", "loggers=[tensorboard]", "log_every=1"]
    result = command("train", *words)
    assert result.code == 0 and len(result.error_lines) == 1, result.err
    assert "TensorBoard: [Errno 28] No space left on device; the run goes on" in result.err


def test_what_a_logger_cannot_begin_is_still_bad_input() -> None:
    class Picky(TensorBoard):
        def on_start(self, run: Any) -> None:
            raise UserError("wandb=x: no key")

    with pytest.raises(UserError):
        Besides(Picky()).on_start(None)  # type: ignore[arg-type]


class Tight(Disk):
    """A disk that holds `room` bytes of checkpoints."""

    def __init__(self, root: Path, room: int) -> None:
        super().__init__(root)
        self.limit = room

    def room(self) -> int:
        return self.limit - sum(p.stat().st_size for p in self.root.rglob("*") if p.is_file())

    def put(self, name: str, fill: Callable[[Path], None]) -> None:
        def checked(folder: Path) -> None:
            fill(folder)
            if self.room() < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        super().put(name, checked)


@pytest.mark.parametrize(("share", "kept"), [(1.5, [6]), (0.5, [])])
def test_keep_last_1_frees_before_it_saves_where_there_is_no_room(
    trained: Path, tmp_path: Path, share: float, kept: list[int], capsys: Any
) -> None:
    size = Disk(trained / "r/checkpoints").size("step-00000004")
    trainer = Trainer.of(config.load([*SMALL, f"out={tmp_path}", "keep_last=1"]))
    assert trainer.folder is not None
    trainer.folder.storage = Tight(tmp_path / "r/checkpoints", int(share * size))
    if kept:
        trainer.train()
        assert "earlier ones were removed first" in capsys.readouterr().err
    else:
        with pytest.raises(TrainingError, match="No space left on device"):
            trainer.train()
    assert checkpoint.steps(tmp_path / "r/checkpoints") == kept


def test_what_would_not_help_is_not_removed(tmp_path: Path) -> None:
    state = {"0-1/w": torch.ones(100)}, {}
    meta = {"step": 1, "epoch": 0, "N": 2, "split": "floor", "best": {}, "wall_seconds": 1.0}
    checkpoint.save(Tight(tmp_path, 4000), *state, meta)
    big = {"0-1/w": torch.ones(10_000)}, {}
    with pytest.raises(checkpoint.NoRoom):
        checkpoint.keep(Tight(tmp_path, 4000), big, {**meta, "step": 2}, None, 1, None)
    assert checkpoint.steps(tmp_path) == [1]


# -- two drivers ----------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from treeprop_ray.run.files import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(900)
"""


def test_a_second_driver_gets_one_line(trained: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(trained, tmp_path / "runs")
    run = tmp_path / "runs/r"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout and first.stdout.readline() == "held\n"
        before = tree(run)
        for more in ([], ["fresh=true"]):
            result = command("train", *SMALL, f"out={tmp_path / 'runs'}", *more)
            assert result.code == 2 and len(result.error_lines) == 1, result.err
            assert f"another process is writing this run (process {first.pid} on" in result.err
        assert tree(run) == before
    finally:
        first.kill()
        first.wait()
    assert command("train", *SMALL, f"out={tmp_path / 'runs'}").code == 0  # the lock died with it


def test_a_run_that_failed_holds_no_lock(tmp_path: Path) -> None:
    settings = config.load([*SMALL, f"out={tmp_path}"])
    with pytest.raises(Stopped):
        Trainer.of(settings, callbacks=[StopAt(3)]).train()
    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append(Trainer.of(settings).train()))
    thread.start()
    thread.join()
    assert other[0]["steps"] == 6
