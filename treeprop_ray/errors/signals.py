"""Signals while modules are being imported, and when a command is over: one line at most, and out.

An exception in the middle of an import may become any other. Only a process that is a command of
ours is ended so; in others (a notebook, a test) a signal does what it did. Nothing here is slow to
import: the package's first line is to set this up.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

SIGINT, SIGTERM = 2, 15
LINES = {
    SIGINT: b"stopped; the same command continues from the last checkpoint\n",
    SIGTERM: b"terminated; the same command continues from the last checkpoint\n",
}
CODES = {SIGINT: 1, SIGTERM: 128 + SIGTERM}
_commands: set[int] = set()  # this process, if it is a command; not those that it forks


def early() -> None:
    """Until a command begins, a signal ends the process."""
    given = zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    by_module = sys.argv[0] == "-m" and any(
        a[:1] == "-" and a[-1:] == "m" and b.partition(".")[0] == "treeprop_ray" for a, b in given
    )
    if by_module or os.path.basename(sys.argv[0]) == "treeprop":
        _commands.add(os.getpid())
        for number in LINES:
            signal.signal(number, end)


def end(number: int, frame: FrameType | None = None) -> None:
    """One line, and out; nothing has been begun that would be lost."""
    os.write(2, LINES[number])
    os._exit(CODES[number])


def end_in_import(number: int, frame: FrameType | None) -> None:
    """`end`, if a command is importing something; else nothing."""
    if os.getpid() in _commands and importing(frame):
        end(number)


def importing(frame: FrameType | None) -> bool:
    """Whether an import is under way."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def late(code: int) -> None:
    """The command is over: a signal hurries Python's own way out."""

    def out(number: int, frame: FrameType | None) -> None:
        try:
            sys.stdout.flush()
        finally:
            os._exit(code)

    if os.getpid() in _commands:
        for number in LINES:
            signal.signal(number, out)


early()
