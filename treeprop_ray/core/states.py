"""States and their context: side inputs of the blocks that do not change along the chain.

A stem may return (z_0, context): a tensor, a tuple or a dict of tensors (attention mask, rotary
embeddings, positions). Blocks are called `block(z, **context)` if it is a dict, else
`block(z, *context)`; the head takes the state alone. No gradient flows through the context. A block
that returns a tuple gives its state first; in a dict it has one of the names STATES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from treeprop_ray.errors import UserError

Spec = pytree.TreeSpec
STATES = ("state", "hidden_states", "last_hidden_state")


def spec_of(context: Any) -> Spec:
    """The structure of a context; every leaf must be a tensor (or stand for one)."""
    return pytree.tree_structure(context)


def split_stem(out: Any) -> tuple[Tensor, Any]:
    """z_0 and the context (None: there is none), which no gradient flows through."""
    if isinstance(out, Tensor):
        return out, None
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[0], Tensor):
        raise UserError(
            f"stem: must return z_0 or (z_0, context), not {type(out).__name__}"
            + (f" of {len(out)}" if isinstance(out, tuple) else "")
        )
    for leaf in pytree.tree_leaves(out[1]):
        if not isinstance(leaf, Tensor):
            raise UserError(f"stem: the context must hold tensors only, not {type(leaf).__name__}")
    return out[0], pytree.tree_map(Tensor.detach, out[1])


def leaves_of(context: Any) -> list[Tensor]:
    """The tensors of a context, in order."""
    return [] if context is None else pytree.tree_leaves(context)


def context_from(leaves: list[Tensor], spec: Spec | None) -> Any:
    """The context that `leaves_of` took apart."""
    return None if spec is None else pytree.tree_unflatten(leaves, spec)


def next_state(block: Callable[..., Any], z: Tensor, context: Any = None) -> Tensor:
    """The state behind a block."""
    if context is None:
        out = block(z)
    elif isinstance(context, dict):
        out = block(z, **context)
    else:
        out = block(z, *context) if isinstance(context, tuple | list) else block(z, context)
    if isinstance(out, Mapping):
        name = next((name for name in STATES if name in out), None)
        if name is None:
            given = ", ".join(map(str, out))
            raise UserError(f"returns {given}; the state must be named one of {', '.join(STATES)}")
        out = out[name]
    state: Tensor = out[0] if isinstance(out, tuple) else out
    return state


class Path(nn.Sequential):
    """Stem, blocks and head one after another, with the context that the stem gives."""

    def forward(self, x: Tensor) -> Tensor:
        stem, *blocks, head = self
        z, context = split_stem(stem(x))
        for block in blocks:
            z = next_state(block, z, context)
        out: Tensor = head(z)
        return out


class Stack(nn.Sequential):
    """Layers that are one block of a tree (core/grouping.py); a path shows them one by one."""

    def forward(self, input: Tensor, *context: Any, **named: Any) -> Tensor:
        z = input
        for layer in self:
            out = layer(z, *context, **named)
            z = out[0] if isinstance(out, tuple) else out
        return z


class ExitHead(nn.Module):
    """A head, and modules that bring states of other shapes (of a sample) into the form it takes.

    They are parts of the head: they live, learn and are stored with it.
    """

    def __init__(self, head: nn.Module, exits: Mapping[tuple[int, ...], nn.Module]) -> None:
        super().__init__()
        self.head, self.shapes = head, list(exits)
        self.exits = nn.ModuleList(exits.values())

    def forward(self, z: Tensor) -> Tensor:
        shape = tuple(z.shape[1:])
        if shape in self.shapes:
            z = self.exits[self.shapes.index(shape)](z)
        out: Tensor = self.head(z)
        return out


@torch.no_grad()
def same_structure(context: Any, spec: Spec | None) -> None:
    """Raise UserError where a stem gives another context than was said."""
    given = None if context is None else spec_of(context)
    if given != spec:
        raise UserError(f"stem: gives the context {given}, but was said to give {spec}")
