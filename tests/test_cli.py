"""The common front of the commands: exit codes, flags, one line for a mistake."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

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
