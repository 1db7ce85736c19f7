"""Random draws that depend on named things only: never on where or in which order code runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

QUIET = {  # modules of torch that draw nothing, if nobody has changed them
    nn.Sequential, nn.ModuleList, nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Conv1d,
    nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.AvgPool2d, nn.MaxPool2d, nn.Sigmoid,
    nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softmax,
}  # fmt: skip


def derive(*words: int | str) -> int:
    """A 63-bit seed from names and numbers, e.g. derive(seed, "noise", step, node)."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draws(module: nn.Module) -> bool:
    """Whether running a module may draw: it has anything inside that is not known to draw nothing.
    Seeding takes as long as a small product, so who draws nothing needs none."""
    return any(
        type(m) not in QUIET or m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__
        for m in module.modules()
    )


def generator(*words: int | str) -> torch.Generator:
    """A CPU generator seeded by `derive(*words)`."""
    return torch.Generator().manual_seed(derive(*words))


@contextmanager
def seeded(*words: int | str) -> Iterator[None]:
    """Seed torch's global generators inside the block; put their state back after."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(*words))
        yield


@contextmanager
def seeded_cpu(seed: int) -> Iterator[None]:
    """Like `seeded` for code that draws on the CPU alone; does not touch (or wait for) a GPU."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def normal_rows(like: Tensor, places: range, *words: int | str) -> Tensor:
    """Standard normal noise shaped like `like` (B, ...), row i drawn for the place `places[i]`.

    One generator per row, made on the CPU, so a row is the same however the batch is cut and on
    whatever device it ends up.
    """
    base = derive(*words)
    rows = torch.empty(like.shape, dtype=torch.float32)
    gen = torch.Generator()
    for row, place in zip(rows, places, strict=True):
        gen.manual_seed(base + place)
        row.normal_(generator=gen)
    return rows.to(like.device, non_blocking=True)
