"""GPT-2: token and position embedding, causal pre-norm blocks, a head that borrows the token table.

Shapes: B sequences, T tokens, D width, H heads, V vocabulary, R rows = B T tokens.
With `model.output_block=true` the head is one more block in front of the language-model head, so a
network of `model.blocks` blocks has N = model.blocks; without it N = model.blocks + 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from treeprop_ray.core.factor import full
from treeprop_ray.core.network import Blueprint

if TYPE_CHECKING:
    from treeprop_ray.config import Model

IGNORED = -100  # labels that do not count
CHUNK = 2**24  # logits that exist at the same time: 64 MB in float32


class Cache:
    """Keys and values (B, H, T, d) of the tokens that an attention has seen."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns all of them."""
        if self.k is not None and self.v is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        self.k, self.v = k, v
        return k, v

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[:, :, :length], self.v[:, :, :length]


class Embedding(nn.Module):
    """Stem: tokens (B, T) to z_0 (B, T, D) with learned positions."""

    def __init__(self, vocabulary: int, context: int, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, model.hidden)
        self.positions = nn.Parameter(torch.empty(context, model.hidden))
        self.dropout = nn.Dropout(model.dropout)
        nn.init.normal_(self.tokens.weight, std=model.init_std)
        nn.init.normal_(self.positions, std=model.init_std)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        positions_TD = self.positions[start : start + x.shape[1]]
        out: Tensor = self.dropout(self.tokens(x) + positions_TD)
        return out


class Attention(nn.Module):
    """Causal multi-head self-attention; with a cache the new tokens also see the cached ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, z: Tensor, cache: Cache | None = None) -> Tensor:
        q, k, v = self.qkv(z).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        new, mask = q.shape[2], None
        if cache is not None:
            k, v = cache.extend(k, v)
            if 1 < new < k.shape[2]:  # token i of the new ones sees i + 1 of them and all before
                ones = torch.ones(new, k.shape[2], dtype=torch.bool, device=z.device)
                mask = ones.tril(k.shape[2] - new)
        mixed_BHTd = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and new == k.shape[2],
        )  # fmt: skip
        out: Tensor = self.project(mixed_BHTd.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A pre-norm GPT-2 block: attention and MLP, each added to its input."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width, inner = model.hidden, round(model.mlp_ratio * model.hidden)
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, model.heads, model.dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, inner)
        self.activation = nn.GELU(approximate="tanh")
        self.contract = nn.Linear(inner, width)
        self.dropout = nn.Dropout(model.dropout)
        for linear in (self.attention.qkv, self.attention.project, self.expand, self.contract):
            nn.init.normal_(linear.weight, std=model.init_std)
            nn.init.zeros_(linear.bias)
        # 2 * blocks additions to the residual stream: each starts that much smaller
        for linear in (self.attention.project, self.contract):
            nn.init.normal_(linear.weight, std=model.init_std / math.sqrt(2 * model.blocks))

    def add_nothing(self) -> None:
        """Give back the input, until it learns."""
        for linear in (self.attention.project, self.contract):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, z: Tensor, cache: Cache | None = None) -> Tensor:
        z = z + self.dropout(self.attention(self.norm_1(z), cache))
        inner = self.activation(self.expand(self.norm_2(z)))
        out: Tensor = z + self.dropout(self.contract(inner))
        return out


class Head(nn.Module):
    """LayerNorm and the token table of the stem, after one more block if there is `output_block`.

    The table belongs to the stem, whose weights, gradients and optimizer state are where the head
    is (the boundary); `borrow` gives the head access without making it a part of the head.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.block = Block(model) if model.output_block else None
        self.norm = nn.LayerNorm(model.hidden)
        self._stem: tuple[Embedding, ...] = ()  # in a tuple: not a submodule

    def borrow(self, stem: Embedding) -> None:
        """Use the token table of `stem`."""
        self._stem = (stem,)

    @property
    def table_VD(self) -> Tensor:
        """The token table."""
        return self._stem[0].tokens.weight

    def features(self, z: Tensor, cache: Cache | None = None) -> Tensor:
        """What the token table is applied to."""
        out: Tensor = self.norm(z if self.block is None else self.block(z, cache))
        return out

    def forward(self, z: Tensor, cache: Cache | None = None) -> Tensor:
        return F.linear(self.features(z, cache), self.table_VD)

    def loss_sum(self, z: Tensor, labels: Tensor) -> Tensor:
        """Summed cross-entropy; never holds the logits of all tokens."""
        h_RD = self.features(z).flatten(0, -2)
        out: Tensor = ChunkedCrossEntropy.apply(h_RD, self.table_VD, labels.flatten(), CHUNK)
        return out

    @torch.no_grad()
    def count(self, z: Tensor, labels: Tensor) -> tuple[float, int, int]:
        """Summed cross-entropy, number of correct labels, number of labels; in chunks as well."""
        h_RD, y_R = self.features(z).flatten(0, -2), labels.flatten()
        rows, loss, correct = rows_of(self.table_VD, CHUNK), 0.0, 0
        for h, y in zip(h_RD.split(rows), y_R.split(rows), strict=True):
            logits = full(F.linear(h, self.table_VD))
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
            correct += int((logits.argmax(-1) == y).sum())
        return loss, correct, int((y_R != IGNORED).sum())


def rows_of(table_VD: Tensor, chunk: int) -> int:
    """How many tokens have `chunk` logits together."""
    return max(1, chunk // len(table_VD))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of h @ table.T against labels, and its gradients, chunk by chunk.

    The gradients are made in the forward pass, while a chunk's logits are there: nothing of size
    (tokens, vocabulary) is kept, and nothing is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, h_RD: Tensor, table_VD: Tensor, y_R: Tensor, chunk: int) -> Tensor:
        device = h_RD.device.type
        if torch.is_autocast_enabled(device):
            h, table = (t.to(torch.get_autocast_dtype(device)) for t in (h_RD, table_VD))
        else:
            h, table = h_RD, table_VD
        wants_h, wants_table = ctx.needs_input_grad[:2]
        grad_h = torch.empty_like(h_RD) if wants_h else None
        grad_table = torch.zeros_like(table_VD) if wants_table else None
        total = torch.zeros((), dtype=full(h_RD).dtype, device=h_RD.device)
        rows = rows_of(table_VD, chunk)
        for at in range(0, len(h), rows):
            h_c, y_c = h[at : at + rows], y_R[at : at + rows, None]
            ignored = y_c == IGNORED
            y_c = y_c.masked_fill(ignored, 0)
            logits = full(h_c @ table.T)
            log_z = logits.logsumexp(-1, keepdim=True)
            total += (log_z - logits.gather(1, y_c)).masked_fill(ignored, 0).sum()
            log_z = log_z.masked_fill(ignored, math.inf)  # a softmax of 0
            if wants_h or wants_table:
                slope = logits.sub_(log_z).exp_()  # softmax - onehot
                slope = slope.scatter_add_(1, y_c, ignored.to(log_z.dtype) - 1).to(h_c.dtype)
            if grad_h is not None:
                grad_h[at : at + rows] = slope @ table
            if grad_table is not None:
                grad_table += slope.T @ h_c
        ctx.save_for_backward(grad_h, grad_table)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_h, grad_table = ctx.saved_tensors
        return (
            None if grad_h is None else slope * grad_h,
            None if grad_table is None else slope * grad_table,
            None,
            None,
        )


def tie(stem: nn.Module, head: nn.Module) -> None:
    """The head uses the stem's token table."""
    assert isinstance(stem, Embedding) and isinstance(head, Head)
    head.borrow(stem)


def blueprint(model: Model, input_shape: tuple[int, ...], classes: int, family: str) -> Blueprint:
    """Blocks of GPT-2 (auxiliary ones look the same) over windows of `input_shape[0]` tokens."""
    (context,) = input_shape
    return Blueprint(
        N=model.blocks if model.output_block else model.blocks + 1,
        stem=lambda: Embedding(classes, context, model),
        block=lambda l, r: Block(model),
        head=lambda: Head(model),
        family=family,
        tie=tie,
    )
