"""The Vision Transformer of the CIFAR and TinyImageNet experiments.

Shapes: B samples, T tokens (patches of an image), D width, H heads, C channels, P patch side.
All linear maps have biases; with width 240, six heads, seven blocks and MLP ratio 2 that gives the
paper's 3.27M, 3.30M and 3.35M deployed parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray.core.network import Blueprint
from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from treeprop_ray.config import Model


class PatchEmbedding(nn.Module):
    """Stem: an image (B, C, S, S) to tokens z_0 (B, T, D) with learned positions."""

    def __init__(self, channels: int, side: int, patch: int, width: int, dropout: float) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Parameter(torch.empty((side // patch) ** 2, width))
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Positions start small, so that a patch is first of all what it shows."""
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        patches_BTK = F.pixel_unshuffle(x, self.patch).flatten(2).transpose(1, 2)
        out: Tensor = self.dropout(self.project(patches_BTK) + self.positions)
        return out


class Attention(nn.Module):
    """Multi-head self-attention over the tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.qkv(z).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed_BHTd = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.project(mixed_BHTd.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A pre-norm Transformer block: attention and MLP, each added to its input."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, dropout: float) -> None:
        super().__init__()
        inner = round(mlp_ratio * width)
        self.attention = nn.Sequential(
            nn.LayerNorm(width), Attention(width, heads), nn.Dropout(dropout)
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, inner), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(inner, width), nn.Dropout(dropout),
        )  # fmt: skip

    def add_nothing(self) -> None:
        """Give back the input, until it learns."""
        for last in (self.attention[1].project, self.mlp[4]):
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.attention(z)
        out: Tensor = z + self.mlp(z)
        return out


class Head(nn.Module):
    """Mean over the tokens, LayerNorm, Linear: z (B, T, D) to logits (B, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.classify(self.norm(z.mean(1)))
        return out


def blueprint(model: Model, input_shape: tuple[int, ...], classes: int, family: str) -> Blueprint:
    """N = blocks + 1: Transformer blocks (auxiliary ones look the same) and the head."""
    channels, height, width = input_shape
    for side in (height, width):
        if side % model.patch:
            fits = ", ".join(str(p) for p in range(1, side + 1) if side % p == 0)
            raise UserError(
                f"model.patch={model.patch}: must divide the image side {side}, one of {fits}"
            )
    if height != width:
        raise UserError(f"model.name=vit: needs square images, this data has {height}x{width}")
    return Blueprint(
        N=model.blocks + 1,
        stem=lambda: PatchEmbedding(channels, height, model.patch, model.hidden, model.dropout),
        block=lambda l, r: Block(model.hidden, model.heads, model.mlp_ratio, model.dropout),
        head=lambda: Head(model.hidden, classes),
        family=family,
    )
