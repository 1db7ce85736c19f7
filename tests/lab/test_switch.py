"""The switch: what it lets through, late or not at all (root only)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from lab.switch import Link, Switch, possible


@pytest.fixture(scope="module", autouse=True)
def hosts_are_possible() -> None:
    if why := possible():
        pytest.skip(f"hosts in network namespaces: skipped ({why})")


@pytest.fixture(scope="module")
def switch(hosts_are_possible: None) -> Iterator[Switch]:
    made = Switch(3)
    yield made
    made.close()


SERVER = "import socket; s = socket.create_server(('', 7)); print('up', flush=True)\nwhile 1:\n c, _ = s.accept(); c.sendall(b'x'); c.close()"  # noqa: E501
CLIENT = "import socket, sys, time; t = time.time(); socket.create_connection((sys.argv[1], 7), 3).recv(1); print(time.time() - t)"  # noqa: E501


def seconds(switch: Switch, source: int, to: int) -> float | None:
    """How long a connection takes; None if there is none."""
    command = switch.hosts[source].inside("python3", "-c", CLIENT, switch.hosts[to].address)
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def test_pairs_are_cut_slowed_and_healed_one_by_one(switch: Switch) -> None:
    server = switch.hosts[1].popen("python3", "-c", SERVER, stdout=subprocess.PIPE)
    try:
        assert server.stdout and server.stdout.readline() == b"up\n"
        assert seconds(switch, 0, 1) is not None and seconds(switch, 2, 1) is not None
        switch.set([(2, 1), (1, 2)], Link(cut=True))
        assert seconds(switch, 2, 1) is None and seconds(switch, 0, 1) is not None
        switch.heal()
        switch.set([(1, 0)], Link(cut=True))  # one way is as good as none
        assert seconds(switch, 0, 1) is None
        switch.heal()
        switch.set([(0, 1), (1, 0)], Link(delay=0.2))
        late = seconds(switch, 0, 1)
        assert late is not None and late >= 0.4
        switch.heal()
    finally:
        server.kill()
        server.wait()
