"""Gradients of several calls, added up in a fixed order whatever the order they come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from treeprop_ray.core.gradients import accumulate

Key = tuple[int, int]  # clock and piece of a call
Gradients = Sequence[Tensor | None]
Result = TypeVar("Result")


class HeadSums:
    """The gradients of some parameters in one step.

    Autograd adds to `.grad` at once. Here each call's gradients are kept apart until those of all
    calls before it (`order`) are in; so the sums are those of one process that does every call.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], order: Sequence[Key]) -> None:
        self.parameters, self.order = parameters, order
        self.waiting: dict[Key, Gradients] = {}
        self.at = 0  # the entry of `order` that is next

    def apart(self, run: Callable[[], Result]) -> tuple[Result, Gradients]:
        """Run something; its gradients are handed out instead of being added."""
        kept = [p.grad for p in self.parameters]
        self._set([None] * len(kept))
        result = run()
        gradients = [p.grad for p in self.parameters]
        self._set(kept)
        return result, gradients

    def put(self, key: Key, gradients: Gradients) -> None:
        """The gradients of a call; None: it has none."""
        self.waiting[key] = gradients
        while self.at < len(self.order) and self.order[self.at] in self.waiting:
            self._add(self.waiting.pop(self.order[self.at]))
            self.at += 1
        if self.at == len(self.order):
            self.at = 0  # the next step

    def clear(self) -> None:
        """Drop a step that was under way."""
        self.waiting.clear()
        self.at = 0

    @torch.no_grad()
    def _add(self, gradients: Gradients) -> None:
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                accumulate(p, gradient)

    def _set(self, gradients: Gradients) -> None:
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient


def parameters_of(*modules: nn.Module) -> list[nn.Parameter]:
    """All parameters, each once."""
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def as_bytes(tensors: Sequence[Tensor | None]) -> Tensor:
    """Tensors of whatever kind as one, for a trip; the first bytes say which are there."""
    there = [t.detach() for t in tensors if t is not None]
    device = there[0].device if there else None
    mask = torch.tensor([t is not None for t in tensors], dtype=torch.uint8, device=device)
    return torch.cat([mask, *(t.contiguous().view(-1).view(torch.uint8) for t in there)])


def from_bytes(data: Tensor, like: Sequence[Tensor]) -> list[Tensor | None]:
    """Back from `as_bytes`, in memory of their own."""
    mask, start = data[: len(like)].tolist(), len(like)
    out: list[Tensor | None] = []
    for is_there, t in zip(mask, like, strict=True):
        stop = start + is_there * t.numel() * t.element_size()
        out.append(data[start:stop].clone().view(t.dtype).view(t.shape) if is_there else None)
        start = stop
    return out
