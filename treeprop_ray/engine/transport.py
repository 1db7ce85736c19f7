"""How tensors travel through Ray's object store: as numpy arrays.

Arrays of 100 kB and more land in shared memory and are read there without a copy, so what arrives
must never be written to. bfloat16 has no numpy type and travels as its int16 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Packet = dict[str, Any]  # tensors by name, in travelling form

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Bits(NamedTuple):
    """A bfloat16 tensor on its way, as int16."""

    array: Any


def to_array(t: Tensor | None) -> Any:
    """A tensor in travelling form for the object store."""
    if t is None:
        return None
    t = t.detach().cpu().contiguous()
    return Bits(t.view(torch.int16).numpy()) if t.dtype == torch.bfloat16 else t.numpy()


ALIGNED = 64  # bytes


def from_array(value: Any) -> Tensor | None:
    """Back from travelling form; shares memory with the object store: read only."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, Bits):
        return aligned(torch.from_numpy(value.array)).view(torch.bfloat16)
    return aligned(torch.from_numpy(value))


def aligned(t: Tensor) -> Tensor:
    """At an address like those of torch's own tensors: products may be rounded otherwise elsewhere.

    The object store packs arrays of less than 2 KB closely, so only small ones are copied.
    """
    return t.clone() if t.data_ptr() % ALIGNED else t


def pack(tensors: Mapping[str, Tensor | None], groups: Iterable[Iterable[str]]) -> list[Packet]:
    """One packet for each group of tensors, so that a reader fetches only what it needs."""
    return [{name: to_array(tensors[name]) for name in group} for group in groups]


def unpack(packets: Iterable[Packet]) -> dict[str, Tensor | None]:
    """The tensors of the packets that arrived."""
    return {name: from_array(value) for packet in packets for name, value in packet.items()}


def size(tensors: Mapping[str, Tensor | None]) -> int:
    """Bytes of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors.values() if t is not None)


def leaving(value: Any) -> Any:
    """A value with tensors inside (tuples and dicts) in travelling form."""
    if isinstance(value, Tensor):
        return to_array(value)
    if type(value) is tuple:
        return tuple(map(leaving, value))
    if type(value) is dict:
        return {key: leaving(part) for key, part in value.items()}
    return value


def weight(value: Any) -> int:
    """Bytes of the tensors in a value in travelling form."""
    if isinstance(value, Bits):
        return int(value.array.nbytes)
    if isinstance(value, np.ndarray):
        return value.nbytes
    parts = value.values() if type(value) is dict else value if type(value) is tuple else ()
    return sum(map(weight, parts))


def arriving(value: Any) -> Any:
    """Back from `leaving`."""
    if isinstance(value, np.ndarray | Bits):
        return from_array(value)
    if type(value) is tuple:
        return tuple(map(arriving, value))
    if type(value) is dict:
        return {key: arriving(part) for key, part in value.items()}
    return value
