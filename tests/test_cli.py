"""The common front of the commands: exit codes, flags, one line for a mistake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from treeprop_ray import config
from treeprop_ray.config import cli, opt
from treeprop_ray.errors import Terminated, TrainingError, UserError


@dataclass
class Own:
    """Settings of a command."""

    size: int = opt(3, "how large", low=1)
    error: str = opt("", "which way it ends")


def load(words: Sequence[str]) -> Own:
    own: Own = config.merge(Own, ("", config.parse_overrides(words)))
    return own


def run(settings: Own) -> int | None:
    errors = {"user": UserError("size=3: too\nsmall"), "run": TrainingError("it broke"),
              "stop": KeyboardInterrupt("step-9"), "pipe": BrokenPipeError()}  # fmt: skip
    if settings.error:
        raise errors[settings.error]
    print(f"size {settings.size}")
    return None


def front(*words: str) -> int:
    return cli.main("What it does.", Own, load, run, argv=words, flags={"--dry-run": lambda s: 7})


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        ([], 0, "size 3", ""),
        (["size=5"], 0, "size 5", ""),
        (["--help"], 0, "how large", ""),
        (["--cfg", "size=4"], 0, "size: 4", ""),
        (["--dry-run"], 7, "", ""),
        (["--wild"], 2, "", "error: --wild: unknown flag; known: --help, --cfg, --dry-run"),
        (["size=0"], 2, "", "error: size=0: must be at least 1"),
        (["sise=2"], 2, "", "did you mean size?"),
        (["error=user"], 2, "", "error: size=3: too\\nsmall"),
        (["error=run"], 1, "", "failed: it broke"),
        (["error=stop"], 1, "", "continues from step-9"),
    ],
)
def test_exit_codes_and_lines(
    words: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert front(*words) == code
    told = capsys.readouterr()
    assert out in told.out and err in told.err
    assert len(told.err.splitlines()) == (1 if err else 0)


# -- the last line of defence -----------------------------------------------------------------


@dataclass
class Nothing:
    """No settings but one."""

    x: int = field(default=1, metadata={"help": "a number"})


def ended_by(error: BaseException, *words: str) -> int:
    def run(settings: Nothing) -> int:
        raise error

    return cli.main("doc", Nothing, lambda words: Nothing(), run, argv=list(words))


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyError("lost\nkey"), 1, r"failed: KeyError: 'lost\nkey' (--debug shows more)"),
        (RecursionError("deep"), 1, "failed: RecursionError: deep (--debug shows more)"),
        (MemoryError(), 1, "failed: MemoryError:  (--debug shows more)"),
        (OSError(28, "No space left"), 1, "failed: OSError: [Errno 28] No space left"),
        (KeyboardInterrupt(), 1, "stopped; the same command continues from the last checkpoint"),
        (Terminated("step-2"), 143, "terminated; the same command continues from step-2"),
        (UserError("x=3: no"), 2, "error: x=3: no"),
        (TrainingError("burnt"), 1, "failed: burnt"),
        (OSError(36, "File name too long", "a" * 5000), 2, f"error: {'a' * 40}…: too long"),
    ],
)
def test_whatever_happens_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended_by(error) == code
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(line.partition(" (")[0])
    assert ended_by(error, "--debug") == code
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_error_in_a_thread_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("in a thread")

    def run(settings: Nothing) -> None:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

    assert cli.main("doc", Nothing, lambda words: Nothing(), run, argv=[]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "warning: a thread failed: ValueError('in a thread')"


STRIKES = """
import atexit, os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
sys.meta_path.insert(0, Finder())
if os.environ["AT"] == "exit":
    atexit.register(os.kill, os.getpid(), int(os.environ["SIGNAL"]))
"""  # in every Python that finds it: a signal arrives when a module is asked for


def struck(tmp_path: Path, at: str, number: int, *words: str) -> tuple[int, str, str]:
    """How a command ends to which a signal comes at some moment."""
    (tmp_path / "sitecustomize.py").write_text(STRIKES)
    path = os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[1])])
    ended = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "AT": at, "SIGNAL": str(number)},
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("command", "at", "number"),
    [
        ("treeprop_ray.train", "treeprop_ray.config", signal.SIGINT),
        ("treeprop_ray train", "treeprop_ray.errors.lines", signal.SIGINT),
        ("treeprop_ray train", "treeprop_ray.train", signal.SIGTERM),
        ("treeprop_ray.train", "omegaconf", signal.SIGTERM),
        ("treeprop_ray.train", "torch", signal.SIGINT),
        ("treeprop_ray.train", "torch.nn.modules", signal.SIGTERM),
        ("treeprop_ray.train", "ray", signal.SIGINT),
    ],
)
def test_a_signal_while_modules_are_imported_is_one_line(
    tmp_path: Path, command: str, at: str, number: int
) -> None:
    """Where an exception might become any other, or a traceback."""
    words = [*command.split(), "engine=local", "steps=1", f"out={tmp_path}"]
    word, code = ("stopped", 1) if number == signal.SIGINT else ("terminated", 143)
    line = f"{word}; the same command continues from the last checkpoint\n"
    assert struck(tmp_path, at, number, *words) == (code, "", line)


def test_a_signal_when_all_is_done_changes_nothing(tmp_path: Path) -> None:
    code, out, err = struck(tmp_path, "exit", signal.SIGINT, "treeprop_ray.train", "--cfg")
    assert (code, err) == (0, "") and "alpha:" in out


def test_what_an_interrupt_has_become_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    def run(settings: Nothing) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(900)
        except KeyboardInterrupt:
            raise RecursionError("somebody's own") from None

    before = signal.getsignal(signal.SIGINT)
    assert cli.main("doc", Nothing, lambda words: Nothing(), run, argv=[]) == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().err.startswith("stopped; the same command continues")


def test_an_interrupt_in_a_destructor_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    class Busy:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def run(settings: Nothing) -> None:
        busy = Busy()
        del busy
        time.sleep(900)

    assert cli.main("doc", Nothing, lambda words: Nothing(), run, argv=[]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped; the same command continues")


def test_sigterm_before_the_first_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []

    def run(settings: Nothing) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(900)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a second one does not disturb the way out
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    assert cli.main("doc", Nothing, lambda words: Nothing(), run, argv=[]) == 143
    assert cleaned and signal.getsignal(signal.SIGTERM) is before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("terminated; the same command continues")
