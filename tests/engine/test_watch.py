"""A lost head is one line; machines that cannot reach each other are found and avoided."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from treeprop_ray.engine import network, watch
from treeprop_ray.engine.ray import RayEngine
from treeprop_ray.engine.watch import Watch, reached


def idle_watch(gcs: str, raylet: str) -> Watch:
    """A watch that looks only when it is told to."""
    made = Watch.__new__(Watch)
    made.gcs, made.raylet, made.failed = gcs, raylet, dict.fromkeys(watch.PATIENCE, 0)
    made.pulse = watch.Pulse(None)
    made.told = lambda: "last checkpoint: step-4; this continues: python train"
    return made


def test_who_listens_is_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
        assert reached(at)
    assert not reached(at) and not reached("nonsense") and not reached("")
    path = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        assert reached(path)
    assert not reached(path)


def test_a_short_absence_is_forgiven_and_a_long_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        made = idle_watch(f"127.0.0.1:{address[1]}", "")
        assert made.look() == ""
    for _ in range(watch.PATIENCE["control store"] - 1):
        assert made.look() == ""
    with socket.create_server(address):
        assert made.look() == "" and made.failed["control store"] == 0
    looks = [made.look() for _ in range(watch.PATIENCE["control store"])]
    assert looks[-1] == "control store" and not any(looks[:-1])
    looks_take = (watch.EVERY + watch.REACH) * watch.PATIENCE["control store"]
    hangs = watch.ANSWER + watch.EVERY * (1 + watch.PATIENCE["control store"])
    assert looks_take < 30 and hangs < 30  # what is promised


def test_who_listens_but_does_not_answer_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = idle_watch(f"127.0.0.1:{server.getsockname()[1]}", "")
        made.pulse.asked = time.monotonic()
        assert made.look() == "" and not made.failed["control store"]
        made.pulse.asked -= 2 * watch.ANSWER
        looks = [made.look() for _ in range(watch.PATIENCE["control store"])]
        assert looks[-1] == "control store" and not any(looks[:-1])


def test_the_end_is_one_line_with_the_way_on() -> None:
    """In a process of its own, which it ends."""
    read, write = os.pipe()
    child = os.fork()  # rather than a new one, which would import torch for seconds
    if not child:
        with contextlib.suppress(BaseException):
            sys.stderr = os.fdopen(write, "w")
            idle_watch("127.0.0.1:1", "").end("control store")
        os._exit(99)
    os.close(write)
    with os.fdopen(read) as told:
        lines = told.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert lines == [
        "failed: Ray's control store (127.0.0.1:1) is gone; last checkpoint: step-4; "
        "this continues: python train"
    ]


def test_the_watch_lasts_until_the_actors_are_ended() -> None:
    """To end them asks the control store, and Ray waits a minute for a lost one."""
    told: list[str] = []

    class Told:
        def __init__(self, word: str) -> None:
            self.stop = self.close = lambda: told.append(word)

    engine = RayEngine.__new__(RayEngine)
    engine.owns_ray = False
    engine.driver, engine._watch = Told("actors"), Told("watch")  # type: ignore[assignment]
    engine.close()
    assert told == ["actors", "watch"]


SILENT = """
import os, sys
from treeprop_ray.engine.watch import LastWord
word = LastWord("failed: somebody ended this")
if sys.argv[1] == "done":
    word.done()
    word.done()
os._exit(1)
"""


@pytest.mark.parametrize(("how", "said"), [("done", ""), ("gone", "failed: somebody ended this\n")])
def test_a_process_that_is_ended_without_a_word_has_a_last_one(how: str, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", SILENT, how], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr == said


# -- who cannot reach whom ------------------------------------------------------------------------


def test_an_ear_answers_and_hears_who_does_not() -> None:
    ear = network.Ear()
    port = ear.server.getsockname()[1]
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        others = {"here": ("127.0.0.1", port), "gone": deaf.getsockname()}
        assert ear.unreached(others) == ["gone"]
    assert network.answers(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("pairs", "home", "avoided"),
    [
        ([], "a", []),
        (["bc"], "a", ["b"]),
        (["ab"], "a", ["b"]),
        (["ab", "ac"], "a", ["b", "c"]),
        (["bc", "bd", "cd"], "a", ["b", "c"]),
        (["cd", "ce", "bf"], "a", ["b", "c"]),
    ],
)
def test_no_cut_pair_is_left_and_home_stays(
    pairs: list[str], home: str, avoided: list[str]
) -> None:
    cut = {frozenset(pair) for pair in pairs}
    assert sorted(network.to_avoid(cut, home)) == avoided


def test_a_chain_of_cuts_costs_every_second_machine() -> None:
    chain = {frozenset(pair) for pair in pairwise("bcdef")}
    avoided = network.to_avoid(chain, "a")
    assert not any(not pair & avoided for pair in chain) and len(avoided) <= 3
