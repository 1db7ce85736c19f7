"""Blocks that are run again in the backward pass (recompute=true): with the buffers that they had.

A run may change buffers: means of batch normalisation, vectors of spectral normalisation. The
second one finds them as the first one did, and leaves them as they are by then: it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, equal, nn
from torch.utils.checkpoint import checkpoint

Buffers = dict[str, Tensor]
_moving: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()  # seen to change


def run_again(module: nn.Module, run: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """`run`, which runs a module; of its activations only the input is kept."""
    out: Tensor = checkpoint(run, z, use_reentrant=False, context_fn=partial(_around, module))
    return out


def _around(module: nn.Module) -> tuple[_First, _Again]:
    """What is around the first run, and around every other."""
    first = _First(module)
    return first, _Again(first)


class _First(AbstractContextManager[None]):
    """Keeps the buffers from before the run that it changes."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.before = module, Buffers()

    def __enter__(self) -> None:
        self.before = _copies(self.module, _moving.get(self.module))

    def __exit__(self, *error: Any) -> None:
        if self.module not in _moving:
            now = dict(self.module.named_buffers())
            _moving[self.module] = [k for k, b in self.before.items() if not equal(now[k], b)]
        moving = _moving[self.module]
        self.before = {name: b for name, b in self.before.items() if name in moving}


class _Again(AbstractContextManager[None]):
    """The same buffers for another run; a backward pass in two steps makes two."""

    def __init__(self, first: _First) -> None:
        self.first, self.now = first, Buffers()

    def __enter__(self) -> None:
        self.now = _copies(self.first.module, list(self.first.before))
        _put(self.first.module, self.first.before)

    def __exit__(self, *error: Any) -> None:
        _put(self.first.module, self.now)


def _copies(module: nn.Module, names: list[str] | None) -> Buffers:
    """Of all buffers, or of some."""
    return {k: b.clone() for k, b in module.named_buffers() if names is None or k in names}


def _put(module: nn.Module, buffers: Buffers) -> None:
    for name, value in buffers.items():
        module.get_buffer(name).data.copy_(value)
