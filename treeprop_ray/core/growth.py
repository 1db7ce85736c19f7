"""Layers of a chain that take the weights of others, or add nothing yet (finish_from=path)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from treeprop_ray.core.head_sums import as_bytes, from_bytes
from treeprop_ray.core.states import Stack
from treeprop_ray.errors import UserError


def layers_in(block: nn.Module) -> list[nn.Module]:
    """The layers of a block of the tree."""
    return list(block.children()) if isinstance(block, Stack) else [block]


def weights_of(block: nn.Module) -> Tensor:
    """Weights and buffers of a block, for a trip."""
    return as_bytes([t for layer in layers_in(block) for t in layer.state_dict().values()])


@torch.no_grad()
def take_weights(block: nn.Module, sent: Tensor, count: int, before: int) -> None:
    """Take the layers from `before` on of `count` that were sent; the others add nothing."""
    for k, layer in enumerate(layers_in(block), before):
        if k >= count:
            layer.add_nothing()  # type: ignore[operator]
            continue
        own = list(layer.state_dict().values())
        found = from_bytes(sent, own * count)[k * len(own) : (k + 1) * len(own)]
        for mine, theirs in zip(own, found, strict=True):
            assert theirs is not None
            mine.copy_(theirs)


def check_growing(blocks: Sequence[nn.Module]) -> None:
    """UserError unless layers can add nothing and are alike."""
    layers = [layer for block in blocks for layer in layers_in(block)]
    for layer in layers:
        if not callable(getattr(layer, "add_nothing", None)):
            raise UserError(
                f"finish_from=path: {type(layer).__name__} has no method add_nothing(), which "
                "makes a layer that gives back its input; use finish_from=chain"
            )
    kinds = {tuple((k, tuple(t.shape), t.dtype) for k, t in x.state_dict().items()) for x in layers}
    if len(kinds) > 1:
        raise UserError("finish_from=path: needs layers of one shape; use finish_from=chain")
