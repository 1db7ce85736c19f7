"""Files from others: nothing in them is resolved, opened, shown as markup, or believed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import Result
from fsspec.implementations.memory import MemoryFileSystem

from treeprop_ray import config
from treeprop_ray.checkup import machine
from treeprop_ray.config import RaySettings, hidden, is_remote
from treeprop_ray.engine import access, runtime
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.comparison import plain
from treeprop_ray.run.loggers import plain as logged
from treeprop_ray.run.storage import storage_at
from treeprop_ray.run.trainer import Trainer

Command = Callable[..., Result]
SMALL = ["model.hidden=8", "model.blocks=3", "batch=128", "steps=2", "name=r", "loggers=[csv]"]


class Far(MemoryFileSystem):
    """An address that counts as far away, and knows who has knocked."""

    protocol = "far"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("user:pw@", "")))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.asked.append(path)
        return super().ls(path, detail, **kwargs)


fsspec.register_implementation("far", Far, clobber=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    Trainer.of(config.load([*SMALL, f"out={tmp_path}"])).train()
    return tmp_path / "r"


def change(run: Path, **values: Any) -> None:
    text = (run / "config.yaml").read_text().splitlines()
    kept = [line for line in text if line.partition(":")[0] not in values]
    more = [f"{k}: {json.dumps(v)}" for k, v in values.items()]
    (run / "config.yaml").write_text("\n".join([*kept, *more]) + "\n")


def commands(run: Path) -> dict[str, list[str]]:
    return {
        "evaluate": [f"run={run}"],
        "export": [f"run={run}"],
        "probe": [f"run={run}"],
        "report": [f"run={run}"],
        "train": ["init_from=" + str(run), *SMALL, f"out={run.parent / 'other'}"],
    }


def test_interpolations_in_files_are_not_resolved(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "the-secret")
    Far.asked.clear()
    change(run, storage="far://${oc.env:SECRET}/x")
    for name, words in commands(run).items():
        result = command(name, *words)
        assert result.code == 2 and len(result.error_lines) == 1, (name, result.err)
        assert "is not resolved in files" in result.err and "the-secret" not in result.err
    assert Far.asked == []
    for text in ("lr: ${oc.env:SECRET}", "model: {name: '${oc.env:SECRET}'}", "freeze: ['${x}']"):
        (run / "mine.yaml").write_text(text)
        result = command("train", f"experiment={run / 'mine.yaml'}", "--cfg")
        assert result.code == 2 and "is not resolved in files" in result.err


def test_an_address_out_of_a_file_is_opened_only_if_the_user_says_so(
    run: Path, command: Command
) -> None:
    change(run, storage="far://elsewhere")
    Far.asked.clear()
    for name, words in commands(run).items():
        result = command(name, *words)
        if name == "report":  # needs no checkpoint
            continue
        assert result.code == 2 and len(result.error_lines) == 1, (name, result.err)
        assert "far://elsewhere" in result.err and "which a file says" in result.err
    assert Far.asked == []
    result = command("evaluate", f"run={run}", "storage=far://elsewhere")
    assert result.code == 2 and "has no checkpoint" in result.err and Far.asked
    shutil.copytree(run / "checkpoints", run.parent / "kept" / "r")
    result = command("evaluate", f"run={run}", f"storage={run.parent / 'kept'}")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        ("https://user@host/x?token=abc&y=1", "https://***@host/x?token=***&y=1"),
        ("https://h/x?X-Amz-Signature=ff&sv=2", "https://h/x?X-Amz-Signature=***&sv=2"),
        ("storage=s3://a:b@c", "storage=s3://***@c"),
        ("run=s3:/key:secret@bucket", "run=s3:/***@bucket"),  # as a path writes it
        ("s3://key:se/cret@bucket/x", "s3://***@bucket/x"),
        ("cannot reach ray://u:secret@h:1: no", "cannot reach ray://***@h:1: no"),
        ("http://h:8080/x@y", "http://h:8080/x@y"),
        ("results/runs", "results/runs"),
        ("a@b", "a@b"),
    ],
)
def test_credentials_of_an_address_are_hidden(url: str, shown: str) -> None:
    assert hidden(url) == shown


def test_credentials_are_in_no_file_and_no_line(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG, logger="treeprop_ray")
    words = [*SMALL, f"out={tmp_path}", "storage=far://user:pw@bucket"]
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    first = command("train", *words, "checkpoint_every=1")
    again = command("train", *words, "steps=4")
    assert first.code == again.code == 0, first.err + again.err
    assert "continuing from far://***@bucket/r/step-00000002" in again.out
    page = command("report", f"run={tmp_path / 'r'}")
    assert page.code == 0, page.err
    wrong = command("train", *words, "seed=3", "fresh=true", "name=r", f"out={tmp_path / 'b'}")
    assert wrong.code == 2 and "is of another run" in wrong.err
    told = [r.out + r.err for r in (first, again, page, wrong)]
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert (tmp_path / "r" / "summary.json") in files
    assert not any("pw" in text for text in told) and "user:pw" not in caplog.text
    assert not [p for p, raw in files.items() if b"user:pw" in raw]
    settings = config.load(words)
    assert "user:pw" not in str(logged(settings)) + str(storage_at(settings.storage).at("x"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tune", ["sweep=alpha_beta", "storage={}"]),
        ("tune", ["sweep={}"]),
        ("tune", ["sweep=alpha_beta", "ray.address=ray://u:the-secret@127.0.0.1:1"]),
        ("train", ["storage={}", "steps=1"]),
        ("train", ["init_from={}", "steps=1"]),
        ("train", ["experiment={}"]),
        ("train", ["storage={}", "{}"]),
        ("train", ["engine=ray", "ray.address=ray://u:the-secret@127.0.0.1:1", "steps=1"]),
        ("evaluate", ["run={}"]),
        ("export", ["run={}"]),
        ("generate", ["run={}"]),
        ("probe", ["run={}"]),
        ("report", ["run={}"]),
        ("watch", ["run={}"]),
        ("compare", ["runs=[{}]", "to=table"]),
        ("compare", ["runs={}"]),
        ("bench", ["{}"]),
        ("doctor", ["ray.address={}"]),
        ("plan", ["run={}"]),
    ],
)
def test_no_command_shows_the_credentials_that_it_was_given(
    name: str, words: list[str], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(name, *(w.format("s3://key:the-secret@bucket/x") for w in words))
    assert result.code and len(result.error_lines) <= 1, result  # doctor has a table
    assert "the-secret" not in result.out + result.err


def test_far_away_is_what_opening_would_talk_to() -> None:
    assert is_remote("s3://x") and is_remote("http://x") and is_remote("FTP://x")
    assert not any(map(is_remote, ("", "/x", "results", "file:///x", "memory://x")))


def test_markup_in_a_foreign_run_is_text_in_tables(run: Path, command: Command) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary.update(method="<script>alert(1)</script>", commit="a|b`c` <img src=x>")
    (run / "summary.json").write_text(json.dumps(summary))
    result = command("compare", f"runs=[{run}]", f"to={run.parent / 'table'}")
    assert result.code == 0, result.err
    page = (run.parent / "table.md").read_text()
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page
    assert plain("a|b`c`\n<") == "a&#124;b&#96;c&#96; &lt;"
    summary["name"] = "../../outside"
    (run / "summary.json").write_text(json.dumps(summary))
    result = command("compare", f"runs=[{run}]", f"to={run.parent / 'table'}")
    assert result.code == 2 and "is no folder name" in result.err
    html = command("report", f"run={run}")
    assert html.code == 0 and "<script" not in (run / "report.html").read_text()


# -- Ray's token, and which Ray ---------------------------------------------------------------


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "auth_token"
    path.write_text("t" * 32)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    return path


def test_a_token_that_others_can_read_is_reported_and_mended(
    token: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token.chmod(0o644)
    finding = machine.authentication(machine.look(str(tmp_path)))
    assert finding.remedy == f"chmod 600 {token}"
    access.guard()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    (line,) = capsys.readouterr().err.splitlines()
    assert "others could read Ray's token" in line
    access.guard()
    assert capsys.readouterr().err == ""
    assert machine.authentication(machine.look(str(tmp_path))).remedy == ""


def test_a_ray_without_a_token_is_warned_of(
    token: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token.chmod(0o600)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    access.guard()
    assert "RAY_AUTH_MODE=disabled: whoever reaches this Ray" in capsys.readouterr().err


def test_auto_says_which_cluster_and_refuses_to_guess(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    running = {"10.0.0.1:6379", "10.0.0.2:6379"}

    def found() -> set[str]:
        return running

    found.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(access.services, "find_gcs_addresses", found)
    with pytest.raises(UserError, match=r"2 clusters run on this machine \(10.0.0.1:6379, 10"):
        runtime.start(RaySettings(address="auto"))
    running.pop()
    (only,) = running
    joined: list[str] = []
    monkeypatch.setattr(runtime, "_knock", lambda address: None)
    monkeypatch.setattr(runtime.ray, "init", lambda address, **_: joined.append(address))
    assert runtime.start(RaySettings(address="auto")) and joined == [only]
    assert f"joined the Ray cluster at {only}" in capsys.readouterr().out
    assert access.the_only("10.9.9.9:1") == "10.9.9.9:1"


def test_the_tests_do_not_touch_the_users_own_token() -> None:
    assert access.token_file() == Path(
        os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    )
