"""A small process beside a driver with a Ray of its own, none of which outlives the driver.

However the driver ends (`kill -9`), Ray's control store and raylet go with it; the raylet's agents
stay for a minute, and an actor that is paused stays for ever. Whoever belongs to the session is
ended a second after the driver. This file is also the program: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 20  # looks until nobody is left; a worker may be starting meanwhile
PAUSE = 0.25


class Guard:
    """Ends the processes of a session, by the name of its folder, when this process is gone."""

    def __init__(self, session: str, ray: str) -> None:
        """`ray`: the folder of the package ray, whose programs a session's processes run."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, session, ray],
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def done(self) -> None:
        """The session is over; whoever is left of it is ended now."""
        self._process.communicate()


def members(session: str, ray: str) -> list[int]:
    """The processes of a session: Ray's programs with its name, and those that a raylet has
    started, which have taken other names but write to its files. Others may read these."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            if command.startswith("ray::"):
                files = (os.readlink(fd) for fd in (entry / "fd").iterdir())
                mine = any(session in file.split("/") for file in files)
            else:
                mine = ray in command and session in command
            if mine:
                found.append(int(entry.name))
    return found


def main(session: str, ray: str) -> None:
    """Wait for the driver's end (its pipe may live on in processes that it has forked)."""
    driver = os.getppid()
    while os.getppid() == driver and not select.select([0], [], [], 1.0)[0]:
        pass
    for _ in range(ROUNDS):
        if not (left := members(session, ray)):
            break
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main(*sys.argv[1:])
