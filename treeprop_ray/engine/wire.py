"""The wire of transport=stream: packets from process to process over torch.distributed.

Connections are made once. A receiving thread per peer fills an inbox; sending does not wait. Who
sends what to whom in which order is known beforehand (engine/stream.py), so packets carry no names.

    message 1   how many tensors, and for each: kind, dimensions; small tensors are inside
    message 2   the bytes of the tensors, where they did not fit into the first

A peer that dies closes its connections: whoever waits for it gets `WireBroken` at once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from treeprop_ray.errors import ActorLost, first_line

SMALL = 8192  # bytes of the first message
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
         torch.uint8, torch.bool, torch.int16]  # fmt: skip


class WireBroken(ActorLost):
    """A peer is gone."""


class Wire:
    """This process's end of the connections of a group."""

    def __init__(
        self, rank: int, world: int, store: tuple[str, int], session: int, patience: float
    ) -> None:
        host, port = store
        if host in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.rank, self.patience = rank, patience
        base = TCPStore(host, port, timeout=timedelta(seconds=patience))
        prefixed = PrefixStore(f"session-{session}", base)
        self.group: Any = ProcessGroupGloo(
            prefixed, rank, world, timedelta(seconds=max(patience, 1.0) * 1000)
        )
        self.inboxes: dict[int, deque[Any]] = {}
        self.arrived = threading.Condition()
        self.error: str = ""
        self.sending: deque[tuple[Any, Any]] = deque()  # work under way and the memory it reads
        self.closed = False

    def listen(self, peers: Sequence[int]) -> None:
        """Start a receiving thread for each peer."""
        for peer in peers:
            self.inboxes[peer] = deque()
            threading.Thread(target=self._receive, args=(peer,), daemon=True).start()

    def send(self, peer: int, tensors: Sequence[Tensor | None]) -> None:
        """Hand tensors over; does not wait until they have arrived."""
        while self.sending and self.sending[0][0].is_completed():
            self.sending.popleft()
        head, body = pack(tensors)
        try:
            for message in (head, body):
                if message is not None:
                    self.sending.append((self.group.send([message], peer, 0), message))
        except RuntimeError as e:
            raise WireBroken(first_line(e)) from e

    def take(self, peer: int) -> list[Tensor | None]:
        """The next packet of a peer, in the order of sending; waits for it."""
        inbox = self.inboxes[peer]
        with self.arrived:
            while not inbox:
                if self.error:
                    raise WireBroken(self.error)
                if not self.arrived.wait(self.patience):
                    raise WireBroken(f"no packet from peer {peer} within {self.patience:g} s")
            return list(inbox.popleft())

    def exchange(self, value: Any, peers: Sequence[int]) -> list[Any]:
        """Give a small value to all peers and take theirs, in the order of `peers`."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for peer in peers:
            self.send(peer, [data])
        answers = [self.take(peer)[0] for peer in peers]
        return [pickle.loads(bytes(t.numpy())) for t in answers if t is not None]

    def close(self) -> None:
        """Drop all connections; peers that wait for this process hear of it."""
        self.closed = True
        self.sending.clear()
        with contextlib.suppress(Exception):
            self.group.abort()
        self.group = None

    def _receive(self, peer: int) -> None:
        head = torch.empty(SMALL, dtype=torch.uint8)
        group = self.group
        try:
            while not self.closed:
                group.recv([head], peer, 0).wait()
                packet = unpack(head, lambda body: group.recv([body], peer, 0).wait())
                with self.arrived:
                    self.inboxes[peer].append(packet)
                    self.arrived.notify_all()
        except Exception as e:  # gloo's own errors: the peer or this process has gone
            with self.arrived:
                self.error = self.error or f"connection to peer {peer}: {first_line(e)}"
                self.arrived.notify_all()


def pack(tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """The first message, and the second if one is needed."""
    facts: list[int] = [len(tensors)]
    flat: list[Tensor] = []
    for t in tensors:
        if t is None:
            facts.append(-1)
            continue
        t = t.detach().cpu().contiguous()
        facts += [KINDS.index(t.dtype), t.dim(), *t.shape]
        flat.append(t.view(-1).view(torch.uint8) if t.numel() else t.new_empty(0).view(torch.uint8))
    header = torch.tensor([len(facts), *facts], dtype=torch.int64).view(torch.uint8)
    size, room = sum(t.numel() for t in flat), SMALL - header.numel()
    head = torch.zeros(SMALL, dtype=torch.uint8)
    head[: header.numel()] = header
    if size <= room:
        start = header.numel()
        for t in flat:
            head[start : start + t.numel()] = t
            start += t.numel()
        return head, None
    return head, flat[0] if len(flat) == 1 else torch.cat(flat)


def unpack(head: Tensor, receive: Any) -> list[Tensor | None]:
    """The tensors of a packet; `receive` fills the second message."""
    count = int(head[:8].view(torch.int64)[0])
    facts = head[8 : 8 * (count + 1)].view(torch.int64).tolist()
    tensors: list[tuple[torch.dtype, list[int]] | None] = []
    at = 1
    for _ in range(facts[0]):
        if facts[at] < 0:
            tensors.append(None)
            at += 1
            continue
        kind, dims = KINDS[facts[at]], facts[at + 1]
        tensors.append((kind, facts[at + 2 : at + 2 + dims]))
        at += 2 + dims
    sizes = [0 if t is None else t[0].itemsize * _count(t[1]) for t in tensors]
    total, start = sum(sizes), 8 * (count + 1)
    if total <= SMALL - start:
        body = head[start : start + total].clone()
    else:
        body = torch.empty(total, dtype=torch.uint8)
        receive(body)
    out: list[Tensor | None] = []
    begin = 0
    for t, size in zip(tensors, sizes, strict=True):
        if t is None:
            out.append(None)
            continue
        part = body[begin : begin + size]
        if begin % t[0].itemsize:
            part = part.clone()
        out.append(part.view(t[0]).view(t[1]))
        begin += size
    return out


def _count(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
