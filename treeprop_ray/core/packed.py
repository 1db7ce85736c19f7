"""States of several tensors: a dict or tuple, packed into one tensor between the blocks.

A stem that returns a dict, or (dict or tuple, context), makes such a state; every block takes the
state and returns one of the same form, the head takes it. The tree sees one tensor (samples,
numbers), so every term of the objective is a mean over all numbers of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.errors import UserError


def outline(state: Any) -> Any:
    """The structure of a state: 0 in place of what is no dict, tuple or list."""
    if isinstance(state, dict):
        return {key: outline(value) for key, value in state.items()}
    return type(state)(map(outline, state)) if type(state) in (tuple, list) else 0


def leaves(state: Any, like: Any) -> Iterator[Any]:
    """What is in a state, in the order of a state with the same keys."""
    if like == 0:
        yield state
    else:
        for key in like if isinstance(like, dict) else range(len(like)):
            yield from leaves(state[key], like[key])


def rebuilt(like: Any, parts: Iterator[Tensor]) -> Any:
    """The state that `leaves` took apart."""
    if like == 0:
        return next(parts)
    if isinstance(like, dict):
        return {key: rebuilt(inner, parts) for key, inner in like.items()}
    return type(like)(rebuilt(inner, parts) for inner in like)


@dataclass(frozen=True)
class Form:
    """The structure of a state, and the shapes of its tensors without the samples."""

    like: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, state: Any, like: Any = None) -> Form:
        """The form of a state; UserError where it cannot be packed."""
        like = outline(state) if like is None else like
        tensors = list(leaves(state, like))
        if not tensors:
            raise UserError("a state holds at least one tensor")
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.dim():
                kind = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise UserError(f"a state holds tensors of floats (samples, …), not {kind}")
        if any(tensor.shape[0] != tensors[0].shape[0] for tensor in tensors):
            raise UserError("the tensors of a state must have one row for each sample")
        return cls(like, tuple(tuple(tensor.shape[1:]) for tensor in tensors))

    def __str__(self) -> str:
        shown: Any = (f"shape {shape}" for shape in self.shapes)
        return str(rebuilt(self.like, shown)).replace("'", "")

    def pack(self, state: Any) -> Tensor:
        """One tensor (samples, numbers)."""
        alike = outline(state) == self.like  # the order of a dict's keys does not matter
        given = Form.of(state, self.like if alike else None)
        if given != self:
            raise UserError(f"gives {given}, must give a state like the stem's, {self}")
        parts = list(leaves(state, self.like))
        return torch.cat([p.flatten(1) if p.dim() > 1 else p.unsqueeze(1) for p in parts], 1)

    def unpack(self, z: Tensor) -> Any:
        """What was packed."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        parts = (
            part.reshape(-1, *shape).contiguous()  # kernels may round strided ones in another way
            for part, shape in zip(z.split(sizes, 1), self.shapes, strict=True)
        )
        return rebuilt(self.like, parts)


class PackedStem(nn.Module):
    """A stem whose state is packed; its context, if any, passes by."""

    def __init__(self, stem: nn.Module, form: Form) -> None:
        super().__init__()
        self.stem, self.form = stem, form

    def forward(self, x: Tensor) -> Any:
        """z_0, or z_0 and the context."""
        state, context = parted(self.stem(x))
        z_0 = self.form.pack(state)
        return z_0 if context is None else (z_0, context)


class PackedBlock(nn.Module):
    """A block between packed states."""

    def __init__(self, block: nn.Module, form: Form) -> None:
        super().__init__()
        self.block, self.form = block, form

    def forward(self, z: Tensor, *context: Any, **named: Any) -> Tensor:
        """The next state."""
        return self.form.pack(self.block(self.form.unpack(z), *context, **named))


class PackedHead(nn.Module):
    """A head that takes the state as the blocks do."""

    def __init__(self, head: nn.Module, form: Form) -> None:
        super().__init__()
        self.head, self.form = head, form

    def forward(self, z: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.form.unpack(z))
        return out


def parted(out: Any) -> tuple[Any, Any]:
    """State and context of what a stem returns."""
    pair = isinstance(out, tuple) and len(out) == 2 and not isinstance(out[0], Tensor)
    return out if pair else (out, None)


@torch.no_grad()
def form_of(stem: nn.Module, example: Any) -> Form | None:
    """The form of the states behind a stem; None where they are one tensor."""
    mode = stem.training
    try:
        out = stem.eval()(example)
        state, _ = parted(out)
    except Exception:  # the check of shapes says it better
        return None
    finally:
        stem.train(mode)
    several = isinstance(state, dict) or (state is not out and isinstance(state, tuple | list))
    try:
        return Form.of(state) if several else None
    except UserError as e:
        raise UserError(f"stem: {e}") from e


Auxiliary = Callable[[int, int], nn.Module]


def packed(
    stem: nn.Module,
    chain: Sequence[nn.Module],
    head: nn.Module,
    auxiliary: Auxiliary | None,
    form: Form,
) -> tuple[nn.Module, list[nn.Module], nn.Module, Auxiliary | None]:
    """The parts of a network whose states are packed."""
    blocks: list[nn.Module] = [PackedBlock(block, form) for block in chain]

    def wrapped(l: int, r: int) -> nn.Module:
        assert auxiliary is not None
        return PackedBlock(auxiliary(l, r), form)

    return (
        PackedStem(stem, form), blocks, PackedHead(head, form), wrapped if auxiliary else None,
    )  # fmt: skip
