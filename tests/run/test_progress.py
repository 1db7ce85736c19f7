"""Ctrl-C that Python drops is noticed at the next step."""

from __future__ import annotations

import os
import signal

import pytest

from treeprop_ray.run.progress import Bar


class Dropping:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the signal arrives in here
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_lost_in_a_destructor_ends_the_run_at_the_next_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Bar("run", 3) as bar:
        thing: Dropping | None = Dropping()
        assert thing
        thing = None
        bar.advance()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_ends_the_run_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Bar("run", 3):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**6):
            pass
        pytest.fail("the signal did not arrive")
