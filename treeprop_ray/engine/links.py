"""Connections between processes: a Unix socket on one machine, TCP from machine to machine.

Every process has a door; of two that talk, the one with the higher rank knocks and shows the token
that the driver has given to all. A link sends without waiting: what the system does not take at
once a thread sends later. It is read by whoever waits for a packet, so that nothing is handed from
thread to thread on the way in.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treeprop_ray.errors import ActorLost, first_line

ROOM = 1 << 16  # bytes of a link that are read ahead
HELLO = struct.Struct("<32sI")  # token, rank
KNOCK_SECONDS = 10  # for a stranger to say who it is
ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_NODELAY": 1}
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for all that share a running system

Buffers = Sequence[bytes | memoryview]


class WireBroken(ActorLost):
    """A peer is gone."""


@dataclass(frozen=True)
class Address:
    """Where a process can be reached."""

    machine: str  # empty: shares its memory with nobody
    local: str  # name of a Unix socket there
    host: str
    port: int
    gpu: str = ""  # its device, if the tensors live there


class Door:
    """Where others knock."""

    def __init__(self, host: str, token: bytes, shares: bool = True) -> None:
        self.token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.outer = socket.create_server((host, 0), family=family, backlog=4096)
        self.inner: socket.socket | None = None
        machine = local = ""
        if shares and hasattr(os, "memfd_create") and BOOT.is_file():
            local = f"\0treeprop-{os.getpid()}-{os.urandom(8).hex()}"  # needs no file
            self.inner = socket.socket(socket.AF_UNIX)
            self.inner.bind(local)
            self.inner.listen(4096)
            machine = BOOT.read_text().strip()
        self.address = Address(machine, local, host, self.outer.getsockname()[1])

    def knock(self, rank: int, address: Address, patience: float) -> Link:
        """Connect to another process."""
        hello = HELLO.pack(self.token, rank)
        if address.machine and address.machine == self.address.machine:
            with contextlib.suppress(OSError):  # in another container, say
                near = socket.socket(socket.AF_UNIX)
                near.connect(address.local)
                near.sendall(hello)
                return Link(near, patience)
        try:
            far = socket.create_connection((address.host, address.port), timeout=patience)
            far.sendall(hello)
        except OSError as e:
            raise WireBroken(f"{address.host}:{address.port}: {first_line(e)}") from e
        return Link(far, patience)

    def admit(self, count: int, patience: float) -> dict[int, Link]:
        """Wait for so many others, by rank; who does not know the token is sent away."""
        links: dict[int, Link] = {}
        deadline = time.monotonic() + patience
        doors = [door for door in (self.outer, self.inner) if door is not None]
        while len(links) < count:
            ready, _, _ = select.select(doors, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WireBroken(f"{count - len(links)} peers did not come within {patience:g} s")
            for door in ready:
                guest, _ = door.accept()
                guest.settimeout(KNOCK_SECONDS)
                with contextlib.suppress(OSError):
                    token, rank = HELLO.unpack(guest.recv(HELLO.size, socket.MSG_WAITALL))
                    if hmac.compare_digest(token, self.token):
                        links[rank] = Link(guest, patience)
                        continue
                guest.close()
        return links

    def close(self) -> None:
        """Nobody is let in any more."""
        self.outer.close()
        if self.inner:
            self.inner.close()


class Link:
    """A connection to one peer."""

    def __init__(self, sock: socket.socket, patience: float) -> None:
        self.near = sock.family == socket.AF_UNIX
        if not self.near:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in ALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # the system keeps the time: Python's own timeouts would ask it twice for every packet
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeval(patience))
        self.sock, self.patience = sock, patience
        self.room = memoryview(bytearray(ROOM))
        self.start = self.stop = 0  # of what has been read ahead
        self.descriptors: deque[int] = deque()  # that came along
        self.backlog: deque[tuple[list[memoryview], int]] = deque()
        self.moved = threading.Condition()
        self.thread: threading.Thread | None = None
        self.error = ""
        self.closed = False

    # -- out ----------------------------------------------------------------------------------

    def send(self, buffers: Buffers, descriptor: int = -1) -> None:
        """Send bytes, and a file descriptor beside them; does not wait. The memory must stay as it
        is; the descriptor is closed when it has been sent."""
        rest = [memoryview(b) for b in buffers]
        with self.moved:
            if self.error:
                raise WireBroken(self.error)
            if not self.backlog:
                try:
                    while rest:
                        rest = after(rest, _put(self.sock, rest, descriptor, socket.MSG_DONTWAIT))
                        descriptor = closed(descriptor)
                    return
                except BlockingIOError:
                    pass
                except OSError as e:
                    raise WireBroken(first_line(e)) from e
            self.backlog.append((rest, descriptor))
            if self.thread is None:
                self.thread = threading.Thread(target=self._send_later, daemon=True)
                self.thread.start()
            self.moved.notify_all()

    def _send_later(self) -> None:
        while True:
            with self.moved:
                while not self.backlog:
                    if self.closed:
                        return
                    self.moved.wait()
                rest, descriptor = self.backlog[0]
            try:
                while rest:
                    rest = after(rest, _put(self.sock, rest, descriptor))
                    descriptor = closed(descriptor)
            except OSError as e:
                self.error = self.error or first_line(e)
                return
            with self.moved:
                self.backlog.popleft()

    # -- in -----------------------------------------------------------------------------------

    def read(self, count: int) -> memoryview:
        """The next few bytes (fewer than ROOM); they are good until the next read."""
        while self.stop - self.start < count:
            if self.start:
                have = self.stop - self.start
                self.room[:have] = self.room[self.start : self.stop]
                self.start, self.stop = 0, have
            self.stop += self._get(self.room[self.stop :])
        self.start += count
        return self.room[self.start - count : self.start]

    def fill(self, target: memoryview) -> None:
        """The next bytes into this memory."""
        have = min(self.stop - self.start, len(target))
        target[:have] = self.room[self.start : self.start + have]
        self.start += have
        while have < len(target):
            have += self._get(target[have:])

    def _get(self, target: memoryview) -> int:
        try:
            if self.near:
                count, extras, _, _ = self.sock.recvmsg_into([target], 256)
                for _, _, data in extras:
                    self.descriptors += memoryview(data).cast("i")
            else:
                count = self.sock.recv_into(target)
        except BlockingIOError as e:
            raise WireBroken(f"no packet within {self.patience:g} s") from e
        except OSError as e:
            raise WireBroken(first_line(e)) from e
        if count == 0:
            raise WireBroken(self.error or "has gone")
        return count

    def close(self) -> None:
        """Leave; the peer hears of it."""
        self.closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        with self.moved:
            self.moved.notify_all()


def timeval(seconds: float) -> bytes:
    """A time as the system takes it; there 0 is for ever."""
    return struct.pack("@ll", *divmod(max(1, int(1e6 * min(seconds, 1e9))), 10**6))


def _put(sock: socket.socket, buffers: Buffers, descriptor: int, flags: int = 0) -> int:
    rights = struct.pack("i", descriptor)
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptor >= 0 else []
    return sock.sendmsg(buffers, beside, flags)


def closed(descriptor: int) -> int:
    """A descriptor that has been sent is not needed here."""
    if descriptor >= 0:
        os.close(descriptor)
    return -1


def after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left when `count` bytes have been sent."""
    for k, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[k + 1 :]]
        count -= len(buffer)
    return []
