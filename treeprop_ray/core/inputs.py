"""Samples of several tensors: packed into one of bytes where data is read, unpacked by the stem.

In between a batch is one tensor with a row for each sample, as it is where samples have one: it is
cut, repeated, moved and sent in the same way. The stem gets a dict, or a tuple, of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.errors import UserError


@dataclass(frozen=True)
class Inputs:
    """The tensors of a sample: their names, shapes and types."""

    names: tuple[str, ...]  # of a tuple "input 1", …
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    named: bool = True  # a dict; else a tuple
    floats: torch.dtype | None = None  # what floats become; None: they stay what they are

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], named: bool) -> Inputs:
        """The form of a batch."""
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors.values())
        return cls(tuple(tensors), shapes, tuple(t.dtype for t in tensors.values()), named)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return ", ".join(self.names)

    def check_same(self, other: Inputs | None, what: str, there: str) -> None:
        """Raise UserError, which names the column, unless `what` has samples like those `there`."""
        if other is None or self.names != other.names:
            raise UserError(f"{what}: has the inputs {self}, {there} {other or 'one tensor'}")
        kinds = zip(self.names, self.kinds, other.kinds, strict=True)
        for name, ours, theirs in kinds:
            if ours != theirs:
                (a, of_a), (b, of_b) = ours, theirs
                raise UserError(
                    f"{what}: {name} has samples of shape {a} {of_a}, {there} {b} {of_b}"
                )

    @property
    def kinds(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each tensor."""
        return list(zip(self.shapes, self.dtypes, strict=True))

    def as_floats(self, dtype: torch.dtype) -> Inputs:
        """The same, whose floats become those of the network."""
        return replace(self, floats=dtype)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One tensor of bytes (samples, bytes of a sample)."""
        wide = (tensors[n].reshape(-1, max(1, math.prod(s))) for n, s in self._shaped())
        return torch.cat([t.contiguous().view(torch.uint8) for t in wide], 1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor] | tuple[Tensor, ...]:
        """What was packed."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self.kinds]
        parts = packed.split(sizes, 1)
        tensors = [
            self._as_float(part.clone(memory_format=torch.contiguous_format).view(dtype))
            .reshape(-1, *shape)
            for part, (shape, dtype) in zip(parts, self.kinds, strict=True)
        ]  # fmt: skip
        return dict(zip(self.names, tensors, strict=True)) if self.named else tuple(tensors)

    def empty(self, samples: int, device: str) -> Any:
        """Samples without numbers."""
        tensors = [
            self._as_float(torch.empty((samples, *shape), dtype=dtype, device=device))
            for shape, dtype in self.kinds
        ]
        return dict(zip(self.names, tensors, strict=True)) if self.named else tuple(tensors)

    def _as_float(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.floats) if self.floats and tensor.is_floating_point() else tensor

    def _shaped(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(zip(self.names, self.shapes, strict=True))


class Unpacks:
    """Stands before a stem and unpacks what data has packed; other inputs pass as they are."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    def __call__(self, stem: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (self.inputs.unpack(given[0]),) if isinstance(given[0], Tensor) else None


def unpacking(make: Callable[[], nn.Module], inputs: Inputs) -> nn.Module:
    """A stem that `make` makes, for packed samples."""
    stem = make()
    stem.register_forward_pre_hook(Unpacks(inputs))
    return stem
