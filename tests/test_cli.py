"""The common front of the commands: exit codes, flags, one line for a mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from treeprop_ray import cli, config
from treeprop_ray.config import opt
from treeprop_ray.errors import TrainingError, UserError


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
