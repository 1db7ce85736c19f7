"""Files written beside training: a slice, then a rest, so that steps hardly notice.

    training   step 12 ───────── step 13 ───────── step 14 ─────────
    writer     ▌        ▌        ▌        ▌        ▌        ▌         each: 8 MB, summed and written

Whoever needs the file makes haste, and it is written without rests.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path

SHARE = 1 / 50  # of the time that a writer works: steps beside it have a limit of 5 %


class Abandoned(Exception):
    """Nobody wants the file any more."""


class Pace:
    """How fast one thread may go."""

    def __init__(self) -> None:
        self._in_haste = threading.Event()
        self._stopped = False
        self._began: tuple[float, float] | None = None

    def hurry(self) -> None:
        """From now on there are no rests."""
        self._in_haste.set()

    def stop(self) -> None:
        """The thread ends with its next rest."""
        self._stopped = True
        self._in_haste.set()

    def rest(self) -> None:
        """In the thread that writes: wait until what it has worked is its share of the time."""
        clock, worked = time.monotonic(), time.thread_time()
        self._began = self._began or (clock, worked)
        due = (worked - self._began[1]) / SHARE - (clock - self._began[0])
        if due > 0:
            self._in_haste.wait(due)
        if self._stopped:
            raise Abandoned


def write(slices: Iterable[bytes | memoryview], pace: Pace, path: Path) -> str:
    """Write a file in slices, at a pace; its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as f:
        for part in slices:
            pace.rest()
            digest.update(part)
            f.write(part)
    return digest.hexdigest()
