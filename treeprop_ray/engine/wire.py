"""The wire of transport=stream: packets of tensors from process to process.

Connections are made once (links.py). Who sends what to whom in which order is known beforehand
(engine/stream.py), so packets carry no names.

    front     lengths of form and body, where the body is
    form      for each tensor: kind, dimensions; the same at every step, so it is read once
    body      the tensors, each at a multiple of 64 bytes: behind the form, or, where it is large
              and the peer on the same machine, in memory that both share (shared.py); tensors of
              two GPUs go from device to device (direct.py)

A peer that dies closes its connections: whoever waits for it gets `WireBroken` at once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from treeprop_ray.engine.direct import Direct
from treeprop_ray.engine.links import Address, Door, Link, WireBroken
from treeprop_ray.engine.shared import START, Pool, Segment
from treeprop_ray.errors import first_line

SMALL = 1 << 15  # bytes up to which a socket is faster than shared memory
ALIGNED = 64  # as torch's own tensors are: products may be rounded otherwise elsewhere
FRONT = struct.Struct("<IiIQ")  # bytes of the form, segment (or one of these), new, bytes of body
BEHIND, BESIDE = -1, -2  # the body is behind the form, or goes from device to device
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
         torch.uint8, torch.bool, torch.int16]  # fmt: skip


class Part(NamedTuple):
    """A tensor of a packet."""

    kind: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the body
    stop: int


class Form(NamedTuple):
    """What a packet looks like."""

    text: bytes
    parts: tuple[Part | None, ...]
    size: int  # of the body


Key = tuple[tuple[torch.dtype, torch.Size] | None, ...]


class Wire:
    """This process's end of the connections of a group."""

    def __init__(self, host: str, token: bytes, patience: float, shares: bool = True) -> None:
        self.patience = patience
        self.door = Door(host, token, shares)
        self.links: dict[int, Link] = {}
        self.pools: dict[int, Pool] = {}
        self.segments: dict[int, list[Segment]] = {}  # of the peers
        self.forms: dict[Key, Form] = {}
        self.known: dict[bytes, Form] = {}
        self.direct: Direct | None = None  # for peers with GPUs

    @property
    def address(self) -> Address:
        """Where others find this process."""
        return self.door.address

    def join(self, rank: int, addresses: Sequence[Address], peers: Sequence[int]) -> None:
        """Connect to the peers; all processes of the group do so at the same time."""
        for peer in peers:
            if peer < rank:
                self.links[peer] = self.door.knock(rank, addresses[peer], self.patience)
        self.links |= self.door.admit(sum(peer > rank for peer in peers), self.patience)
        self.door.close()
        for peer in peers:
            self.pools[peer], self.segments[peer] = Pool(), []

    def send(self, peer: int, tensors: Sequence[Tensor | None]) -> None:
        """Hand tensors over; does not wait until they have arrived."""
        link = self.links[peer]
        form = self._form_of(tensors)
        try:
            if self.direct and self._goes_beside(peer, tensors):
                link.send([FRONT.pack(len(form.text), BESIDE, 0, 0) + form.text])
                for t in tensors:
                    if t is not None and t.numel():
                        self.direct.send(peer, t.detach().to(self.direct.device).contiguous())
                return
        except WireBroken as e:
            raise WireBroken(f"connection to peer {peer}: {first_line(e)}") from e
        ready = [None if t is None else t.detach().cpu().contiguous() for t in tensors]
        try:
            if form.size <= SMALL or not link.near:
                front = FRONT.pack(len(form.text), BEHIND, 0, form.size)
                link.send([front + form.text, *_body(form, ready)])
                return
            pool = self.pools[peer]
            number, descriptor = pool.take(form.size)
            body = torch.from_numpy(pool.segments[number].bytes)
            for part, t in zip(form.parts, ready, strict=True):
                if part is not None and t is not None:
                    target = body[START + part.start : START + part.stop]
                    target.view(part.kind).view(part.shape).copy_(t)
            front = FRONT.pack(len(form.text), number, descriptor >= 0, form.size)
            link.send([front + form.text], descriptor)
        except WireBroken as e:
            raise WireBroken(f"connection to peer {peer}: {first_line(e)}") from e

    def take(self, peer: int) -> list[Tensor | None]:
        """The next packet of a peer, in the order of sending; waits for it. Read only."""
        link = self.links[peer]
        try:
            length, where, new, size = FRONT.unpack(link.read(FRONT.size))
            text = bytes(link.read(length))
            form = self.known.get(text) or self.known.setdefault(text, parsed(text))
            if where == BESIDE:
                return self._from_beside(peer, form)
            if where == BEHIND:
                body = torch.empty(size, dtype=torch.uint8)
                link.fill(body.numpy().data)
            else:
                if new:
                    descriptor = link.descriptors.popleft()
                    self.segments[peer].append(Segment(descriptor))
                    os.close(descriptor)
                body = self.segments[peer][where].lent(size)
        except WireBroken as e:
            raise WireBroken(f"connection to peer {peer}: {first_line(e)}") from e
        return [
            None if part is None else body[part.start : part.stop].view(part.kind).view(part.shape)
            for part in form.parts
        ]

    def _goes_beside(self, peer: int, tensors: Sequence[Tensor | None]) -> bool:
        """Whether a packet goes from device to device: something of it is there already."""
        assert self.direct is not None
        kind = self.direct.device.type
        there = any(t is not None and t.numel() and t.device.type == kind for t in tensors)
        return there and peer in self.direct.partners

    def _from_beside(self, peer: int, form: Form) -> list[Tensor | None]:
        assert self.direct is not None
        out: list[Tensor | None] = []
        for part in form.parts:
            if part is None:
                out.append(None)
                continue
            target = torch.empty(part.shape, dtype=part.kind, device=self.direct.device)
            out.append(self.direct.receive(peer, target) if target.numel() else target)
        return out

    def exchange(
        self,
        value: Mapping[str, float],
        peers: Sequence[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> list[dict[str, float]]:
        """Give some figures to all peers and take theirs, in the order of `peers`; `meanwhile` what
        can be done before these are there."""
        names = torch.frombuffer(bytearray("\n".join(value).encode() or b"\n"), dtype=torch.uint8)
        figures = torch.tensor(list(value.values()), dtype=torch.float64)
        for peer in peers:
            self.send(peer, [names, figures])
        if meanwhile:
            meanwhile()
        answers = []
        for peer in peers:
            told, theirs = self.take(peer)
            assert told is not None and theirs is not None
            keys = bytes(told.numpy()).decode().split("\n") if len(theirs) else []
            answers.append(dict(zip(keys, theirs.tolist(), strict=True)))
        return answers

    def close(self) -> None:
        """Drop all connections; peers that wait for this process hear of it."""
        self.door.close()
        if self.direct:
            self.direct.close()
        for link in self.links.values():
            link.close()
        self.pools.clear()
        self.segments.clear()

    def _form_of(self, tensors: Sequence[Tensor | None]) -> Form:
        key = tuple(None if t is None else (t.dtype, t.shape) for t in tensors)
        return self.forms.get(key) or self.forms.setdefault(key, described(key))


def described(key: Key) -> Form:
    """The form of tensors of these kinds and shapes."""
    facts = [len(key)]
    for entry in key:
        facts += [-1] if entry is None else [KINDS.index(entry[0]), len(entry[1]), *entry[1]]
    return parsed(struct.pack(f"<{len(facts)}q", *facts))


def parsed(text: bytes) -> Form:
    """A form as it is written in a packet."""
    facts = list(struct.unpack(f"<{len(text) // 8}q", text))
    parts: list[Part | None] = []
    at, end = 1, 0
    for _ in range(facts[0]):
        if facts[at] < 0:
            parts.append(None)
            at += 1
            continue
        kind, dims = KINDS[facts[at]], facts[at + 1]
        shape = tuple(facts[at + 2 : at + 2 + dims])
        start = -(-end // ALIGNED) * ALIGNED
        end = start + kind.itemsize * torch.Size(shape).numel()
        parts.append(Part(kind, shape, start, end))
        at += 2 + dims
    return Form(text, tuple(parts), end)


def _body(form: Form, tensors: Sequence[Tensor | None]) -> list[bytes | memoryview]:
    """The bytes of the tensors, with gaps."""
    buffers: list[bytes | memoryview] = []
    end = 0
    for part, t in zip(form.parts, tensors, strict=True):
        if part is None or t is None or part.start == part.stop:
            continue
        if part.start > end:
            buffers.append(bytes(part.start - end))
        buffers.append(t.reshape(-1).view(torch.uint8).numpy().data)
        end = part.stop
    if form.size > end:
        buffers.append(bytes(form.size - end))
    return buffers
