"""What copies of a host say to each other at the end of a step, over a wire (transport=stream)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from treeprop_ray.engine import transport

LARGE = 256  # numbers from which on a tensor travels by itself
LITTLE = 1 << 17  # bytes of all weights of a host up to which copies relay what they say


class Sends(Protocol):
    """A wire, as far as it is needed here: packets arrive in the order of sending."""

    def send(self, peer: int, tensors: Sequence[Tensor | None]) -> None: ...
    def take(self, peer: int) -> list[Tensor | None]: ...


class Slot:
    """The place of a large tensor in what is pickled."""

    def __init__(self, index: int) -> None:
        self.index = index


def swap(wire: Sends, peers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Give each peer its value, and take theirs, in the order of `peers`."""
    for peer, value in zip(peers, values, strict=True):
        say(wire, peer, value)
    return [heard(wire, peer) for peer in peers]


def say(wire: Sends, peer: int, value: Any) -> None:
    """Send a value; its large tensors travel by themselves."""
    large: list[Tensor | None] = []
    small = pickle.dumps(_without(value, large))
    wire.send(peer, [torch.frombuffer(bytearray(small), dtype=torch.uint8), *large])


def heard(wire: Sends, peer: int) -> Any:
    """The value that a peer has sent."""
    text, *large = wire.take(peer)
    assert text is not None
    return _with(pickle.loads(text.numpy().tobytes()), large)


class Ring:
    """All copies of a host, who say something to each other: to all at once, or, where messages
    cost more than bytes (`relays`), in log2 of the copies rounds of one message each.

    In round j copy k sends to copy k + 2**j whatever has that step on its way: with 5 copies what
    is meant for copy k + 3 goes to k + 1 and from there, in the next round, to k + 3.
    """

    def __init__(self, wire: Sends, ranks: Sequence[int], own: int, relays: bool) -> None:
        """`ranks`: of all copies, in their order; `own`: which of them this is."""
        self.wire, self.ranks, self.own, self.relays = wire, list(ranks), own, relays
        self.twins = [rank for k, rank in enumerate(self.ranks) if k != own]

    def deal(self, values: Sequence[Any]) -> list[Any]:
        """Give each copy its value (`values` has one for each, the own one stays here); what the
        others have for this one, in their order."""
        if not self.relays:
            return swap(self.wire, self.twins, [v for k, v in enumerate(values) if k != self.own])
        count = len(self.ranks)
        held = [_small(values[(self.own + way) % count]) for way in range(count)]
        gap = 1
        while gap < count:
            moving = [way for way in range(count) if way & gap]
            for way, value in zip(moving, self._pass(gap, [held[w] for w in moving]), strict=True):
                held[way] = value
            gap *= 2
        return self._in_order(held)

    def tell(self, value: Any) -> list[Any]:
        """Tell all copies the same; what the others tell, in their order."""
        if not self.relays:
            return swap(self.wire, self.twins, [value] * len(self.twins))
        held, gap = [_small(value)], 1
        while gap < len(self.ranks):
            held += self._pass(gap, held[: len(self.ranks) - gap])
            gap *= 2
        return self._in_order(held)

    def hand_on(self, value: Any) -> Any:
        """Give the next copy a value; that of the copy before."""
        count = len(self.ranks)
        after, before = (self.ranks[(self.own + way) % count] for way in (1, -1))
        say(self.wire, after, value)
        return heard(self.wire, before)

    def _pass(self, gap: int, values: list[bytes]) -> list[bytes]:
        """Send values so many copies on; those of who is as many behind."""
        count = len(self.ranks)
        data = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)
        self.wire.send(self.ranks[(self.own + gap) % count], [data])
        (arrived,) = self.wire.take(self.ranks[(self.own - gap) % count])
        assert arrived is not None
        out: list[bytes] = pickle.loads(arrived.numpy().tobytes())
        return out

    def _in_order(self, held: Sequence[bytes]) -> list[Any]:
        """What came so many copies far, in the order of the copies."""
        count = len(self.ranks)
        ways = [(self.own - k) % count for k in range(count) if k != self.own]
        return [transport.arriving(pickle.loads(held[way])) for way in ways]


def _small(value: Any) -> bytes:
    return pickle.dumps(transport.leaving(value))


def _without(value: Any, large: list[Tensor | None]) -> Any:
    """A value (tuples and dicts) whose large tensors are put aside."""
    if isinstance(value, Tensor):
        if value.numel() < LARGE:
            return transport.to_array(value)
        large.append(value)
        return Slot(len(large) - 1)
    if type(value) is tuple:
        return tuple(_without(part, large) for part in value)
    if type(value) is dict:
        return {key: _without(part, large) for key, part in value.items()}
    return value


def _with(value: Any, large: Sequence[Tensor | None]) -> Any:
    """Back from `_without`."""
    if isinstance(value, Slot):
        return large[value.index]
    if type(value) is tuple:
        return tuple(_with(part, large) for part in value)
    if type(value) is dict:
        return {key: _with(part, large) for key, part in value.items()}
    return transport.arriving(value)
