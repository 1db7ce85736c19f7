"""A lost head is one line; machines that cannot reach each other are found and avoided."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from treeprop_ray.engine import network, watch
from treeprop_ray.engine.watch import Watch, reached


def idle_watch(gcs: str, raylet: str) -> Watch:
    """A watch that looks only when it is told to."""
    made = Watch.__new__(Watch)
    made.gcs, made.raylet, made.failed = gcs, raylet, dict.fromkeys(watch.PATIENCE, 0)
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
    assert watch.EVERY * watch.PATIENCE["control store"] < 30  # what is promised


ENDS = """
from test_watch import idle_watch
idle_watch("127.0.0.1:1", "").end("control store")
"""


def test_the_end_is_one_line_with_the_way_on() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "failed: Ray's control store (127.0.0.1:1) is gone; last checkpoint: step-4; "
        "this continues: python train"
    ]


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
