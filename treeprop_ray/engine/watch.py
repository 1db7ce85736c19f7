"""The watch over the Ray that a run depends on.

When the head, its control store or this machine's raylet is gone, `ray.get` waits for minutes, and
Ray then ends the process without a word. The watch says one line before, and ends it itself. A
control store that hangs still takes connections, so it is also asked something.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RpcError

EVERY = 1.0  # seconds between looks
PATIENCE = {"control store": 10, "raylet": 2}  # looks in a row that must fail
REACH = 1.5  # seconds for a connection
ANSWER = 8.0  # seconds that the control store may take for an answer


class Pulse(threading.Thread):
    """Asks the control store for a small thing, again and again."""

    def __init__(self, client: Any) -> None:
        super().__init__(daemon=True, name="pulse of Ray's control store")
        self.client, self._over = client, threading.Event()
        self.asked: float | None = None  # since when an answer is due

    def run(self) -> None:
        """Ask until it is over. An error is an answer; what has not come in time is asked again."""
        late: tuple[type[Exception], ...] = (RpcError, GetTimeoutError)
        while not self._over.is_set():
            self.asked = self.asked or time.monotonic()
            try:
                self.client.internal_kv_get(b"pulse", namespace=b"treeprop", timeout=ANSWER)
            except late:
                self._over.wait(EVERY)
                continue
            except Exception:
                pass
            self.asked = None
            self._over.wait(EVERY)

    def late(self) -> bool:
        """Whether an answer is overdue."""
        asked = self.asked
        return asked is not None and time.monotonic() - asked > ANSWER

    def stop(self) -> None:
        """No more questions."""
        self._over.set()


class Watch(threading.Thread):
    """Looks whether Ray is there; `told` says what a user needs to know if it is not."""

    def __init__(self, told: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="watch over Ray")
        self.told, self._over = told, threading.Event()
        node = ray._private.worker._global_node
        self.gcs: str = ray.get_runtime_context().gcs_address
        self.raylet = str(node.raylet_socket_name) if node is not None else ""
        self.failed = dict.fromkeys(PATIENCE, 0)
        self.pulse = Pulse(getattr(ray._private.worker.global_worker, "gcs_client", None))

    def run(self) -> None:
        """Look until it is over."""
        if self.pulse.client is not None:  # none behind ray://
            self.pulse.start()
        while not self._over.wait(EVERY):
            if gone := self.look():
                self.end(gone)

    def look(self) -> str:
        """What has been gone for too long; empty if all is well."""
        there = {
            "control store": reached(self.gcs) and not self.pulse.late(),
            "raylet": not self.raylet or reached(self.raylet),
        }
        for name, found in there.items():
            self.failed[name] = 0 if found else self.failed[name] + 1
        return next((name for name in there if self.failed[name] >= PATIENCE[name]), "")

    def end(self, gone: str) -> None:
        """One line, and out: nothing that asks Ray would come back."""
        where = self.gcs if gone == "control store" else "this machine"
        print(f"failed: Ray's {gone} ({where}) is gone; {self.told()}", file=sys.stderr, flush=True)
        node = ray._private.worker._global_node
        if node is not None and node.is_head():  # our own: nothing of it is left behind
            with contextlib.suppress(Exception):
                node.kill_all_processes(check_alive=False, allow_graceful=False)
        os._exit(1)

    def stop(self) -> None:
        """No more looks."""
        self._over.set()
        self.pulse.stop()


WAITS = """import sys
if sys.stdin.read() != "done":
    print(sys.argv[1], file=sys.stderr, flush=True)
"""


class LastWord:
    """A small process that says a line if this one ends without having said `done`.

    A driver that asks its raylet all the time, as Tune does, is ended by Ray the moment the raylet
    is gone: no thread of its own is quick enough.
    """

    def __init__(self, line: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WAITS, line],
            stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def done(self) -> None:
        """There is nothing to say; twice is no mistake."""
        if self._process.poll() is None:
            self._process.communicate("done")


def reached(address: str) -> bool:
    """Whether somebody listens at host:port, or at the path of a socket."""
    is_path = address.startswith("/")
    family = socket.AF_UNIX if is_path else socket.AF_INET
    host, _, port = address.rpartition(":")
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(REACH)
            probe.connect(address if is_path else (host, int(port)))
        return True
    except (OSError, ValueError):
        return False
