"""What copies of a host say to each other at the end of a step, over a wire (transport=stream)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from treeprop_ray.engine import transport

LARGE = 256  # numbers from which on a tensor travels by itself


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
        large: list[Tensor | None] = []
        small = pickle.dumps(_without(value, large))
        wire.send(peer, [torch.frombuffer(bytearray(small), dtype=torch.uint8), *large])
    out = []
    for peer in peers:
        text, *large = wire.take(peer)
        assert text is not None
        out.append(_with(pickle.loads(text.numpy().tobytes()), large))
    return out


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
