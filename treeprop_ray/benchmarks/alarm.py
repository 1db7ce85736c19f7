"""Sleeps that last what they should: who stands for a device must not be slower than it."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

SET_TIMER_SLACK = 29  # of prctl, in nanoseconds


def punctual() -> None:
    """Have this thread woken up when it asked for; Linux may take 0.05 ms longer to save power."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_TIMER_SLACK, 1)


class Alarm:
    """Sleeps for a time, never less.

    A machine that idles wakes a process up a fraction of a millisecond late, the later the longer
    it slept; a device that computes has no such delay. So it asks to be woken up earlier by about
    as much as it was late before, and what then is left it waits through.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.clock, self.sleep = clock, sleep
        self.late = 0.0  # seconds
        punctual()

    def __call__(self, seconds: float) -> None:
        end = self.clock() + seconds
        if seconds > self.late:
            self.sleep(seconds - self.late)
        over = self.clock() - end
        # mostly a little late: waiting takes a core away from the others
        self.late = max(0.0, self.late + over * (0.1 if over > 0 else 0.5))
        while self.clock() < end:
            pass
