"""Hosts in network namespaces on one machine, and the switch between them, in user space.

Every host has one network card (a tap device) whose other end is a file of this process. The switch
hands frames on, late, or not at all, by rules for each direction of each pair. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
NET = "10.77.0"


@dataclass(frozen=True)
class Link:
    """How frames go from one host to another."""

    delay: float = 0.0  # seconds
    loss: float = 0.0  # share
    cut: bool = False


class Switch(threading.Thread):
    """Hands frames from host to host."""

    def __init__(self, hosts: int, seed: int = 1) -> None:
        super().__init__(daemon=True, name="switch")
        self.links: dict[tuple[int, int], Link] = {}
        self.dice, self._over = random.Random(seed), False
        self.late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self.hosts = [Host(k) for k in range(hosts)]
        self.start()

    def set(self, pairs: Sequence[tuple[int, int]], link: Link) -> None:
        """A rule for some directions."""
        self.links |= dict.fromkeys(pairs, link)

    def heal(self) -> None:
        """All links are whole again."""
        self.links = {}

    def run(self) -> None:
        """Hand frames on until it is over."""
        by_file = {host.tap: host.number for host in self.hosts}
        poll = select.poll()
        for file in by_file:
            poll.register(file, select.POLLIN)
        while not self._over:
            wait = max(0.0, self.late[0][0] - time.monotonic()) if self.late else 0.2
            for file, _ in poll.poll(min(wait, 0.2) * 1000):
                for _ in range(64):
                    try:
                        frame = os.read(file, 65536)
                    except (BlockingIOError, OSError):
                        break
                    self._hand_on(by_file[file], frame)
            while self.late and self.late[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(self.late)
                self._write(to, frame)

    def _hand_on(self, source: int, frame: bytes) -> None:
        everyone = bool(frame[0] & 1)
        targets = range(len(self.hosts)) if everyone else [frame[5]]
        for to in targets:
            if to == source or to >= len(self.hosts):
                continue
            link = self.links.get((source, to), Link())
            if link.cut or (link.loss and self.dice.random() < link.loss):
                continue
            if link.delay:
                due = time.monotonic() + link.delay
                heapq.heappush(self.late, (due, next(self._numbers), to, frame))
            else:
                self._write(to, frame)

    def _write(self, to: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue is a lost frame, as in life
            os.write(self.hosts[to].tap, frame)

    def close(self) -> None:
        """Remove the hosts."""
        self._over = True
        self.join()
        for host in self.hosts:
            host.close()


class Host:
    """A network namespace with a card of its own."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"treeprop-{os.getpid()}-{number}"
        self.address = f"{NET}.{number + 1}"
        card = f"tp{os.getpid()}-{number}"
        ip("netns", "add", self.name)
        self.tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(self.tap, TUNSETIFF, struct.pack("16sH", card.encode(), IFF_TAP | IFF_NO_PI))
        ip("link", "set", card, "netns", self.name)
        inside = ["-n", self.name]
        ip(*inside, "link", "set", card, "name", "tp0")
        ip(*inside, "link", "set", "tp0", "address", f"02:00:00:00:00:{number:02x}")
        ip(*inside, "addr", "add", f"{self.address}/24", "dev", "tp0")
        ip(*inside, "link", "set", "tp0", "up")
        ip(*inside, "link", "set", "lo", "up")

    def inside(self, *command: str) -> list[str]:
        """A command that runs on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def popen(self, *command: str, **more: Any) -> subprocess.Popen[bytes]:
        """Start a command on this host, in a session of its own."""
        return subprocess.Popen(self.inside(*command), start_new_session=True, **more)

    def close(self) -> None:
        """Remove the namespace; its card goes with it."""
        with contextlib.suppress(OSError):
            os.close(self.tap)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


def ip(*words: str) -> None:
    """iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def possible() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    try:
        ip("netns", "add", name := f"treeprop-try-{os.getpid()}")
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return "needs iproute2 and network namespaces"
    return ""
