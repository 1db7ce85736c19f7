"""Memory that two processes of one machine share: a packet is written there once and read there.

The first byte of a segment says whether the reader still needs it. It is the reader's tensors that
keep it: when the last one is gone, the writer may use the segment again.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

START = 64  # bytes before the data, which is aligned as torch's own tensors are
PAGE = 4096


class Segment:
    """Shared memory; the descriptor is closed with it."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.watch: Any = None

    @property
    def size(self) -> int:
        """Bytes of data that it can hold."""
        return len(self.bytes) - START

    @property
    def free(self) -> bool:
        """Whether its last packet is not needed any more."""
        return not self.bytes[0]

    def lent(self, size: int) -> Tensor:
        """The data as a tensor, which must not be written to; free again when that is gone."""
        data = self.bytes[START : START + size]
        self.watch = weakref.ref(data, self._give_back)
        return torch.from_numpy(data)

    def _give_back(self, _: object) -> None:
        self.bytes[0] = 0


class Pool:
    """The segments that this process writes for one peer; both know them by their numbers."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def take(self, size: int) -> tuple[int, int]:
        """(number, descriptor) of a segment that is free; the descriptor is -1 unless it is new."""
        for number, segment in enumerate(self.segments):
            if size <= segment.size < size + PAGE and segment.free:
                segment.bytes[0] = 1
                return number, -1
        descriptor = os.memfd_create("treeprop")
        os.ftruncate(descriptor, -(-(START + size) // PAGE) * PAGE)
        segment = Segment(descriptor)
        segment.bytes[0] = 1
        self.segments.append(segment)
        return len(self.segments) - 1, descriptor
