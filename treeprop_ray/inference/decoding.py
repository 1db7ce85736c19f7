"""Continuing a text: plain decoding with a cache, and self-speculative decoding.

In self-speculative decoding a short path of the tree drafts some tokens and the full chain, which
reads them all in one call, accepts a beginning of them. A draft x from q is accepted with
probability min(1, p(x) / q(x)); the first rejected one is drawn anew from max(0, p - q), so the
tokens are distributed as if drawn from p, the full chain. Greedy decoding is the case in which p
and q are 0 or 1: the tokens are then the same as without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from treeprop_ray.core.factor import full
from treeprop_ray.models.gpt import Block, Cache, Embedding, Head


@dataclass(frozen=True)
class Sampler:
    """How a token is drawn from logits: temperature 0 takes the largest; top_k = 0 takes all."""

    temperature: float = 1.0
    top_k: int = 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution (…, V) that a token is drawn from."""
        logits = full(logits).double()
        if self.temperature == 0:
            largest = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits).scatter_(-1, largest, 1.0)
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return (logits / self.temperature).softmax(-1)


def window_start(length: int, context: int) -> int:
    """Where the window begins that predicts the token after `length` tokens.

    Learned positions end at `context`; when the window is full it moves on by half its size.
    """
    half = max(1, context // 2)
    return -(-max(0, length - context) // half) * half


class Decoder:
    """A path of the network with the keys and values of the tokens it has read."""

    def __init__(self, chain: nn.Sequential) -> None:
        stem, *blocks, head = chain.eval()
        assert isinstance(stem, Embedding) and isinstance(head, Head)
        self.stem, self.head = stem, head
        self.blocks = [block for block in blocks if isinstance(block, Block)]
        self.context = len(stem.positions)
        self._forget(0)

    def _forget(self, start: int) -> None:
        self.start = self.known = start  # the window's first token; tokens before `known` are read
        self.caches = [Cache() for _ in range(len(self.blocks) + 1)]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int = 1) -> Tensor:
        """Logits (last, V) after each of the last `last` tokens; reads those not yet known."""
        start = window_start(len(tokens), self.context)
        if start != self.start:
            self._forget(start)
        new = torch.tensor([tokens[self.known :]], device=self.stem.positions.device)
        z = self.stem(new, self.known - self.start)
        began = time.perf_counter()
        for block, cache in zip(self.blocks, self.caches, strict=False):
            z = block(z, cache)
        self.in_blocks = time.perf_counter() - began
        h = self.head.features(z, self.caches[-1])
        self.known = len(tokens)
        return nn.functional.linear(h[0, -last:], self.head.table_VD)

    def cut(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if length < self.known:
            self.known = max(length, self.start)
            for cache in self.caches:
                cache.cut(self.known - self.start)


@dataclass
class Continuation:
    """New tokens, and how many drafts were made and accepted for them."""

    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    drafters: list[str] = field(default_factory=list)  # draft=auto: whom it chose, in order


def draw(p: Tensor, generator: torch.Generator) -> int:
    """A token from a distribution (V)."""
    return int(torch.multinomial(p, 1, generator=generator))


def decode(
    chain: Decoder, prompt: Sequence[int], count: int, sampler: Sampler, seed: int
) -> Continuation:
    """`count` tokens after the prompt, one at a time."""
    generator = torch.Generator().manual_seed(seed)
    chain.cut(0)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(draw(sampler.probabilities(chain.logits(tokens)[0]).cpu(), generator))
    return Continuation(tokens[len(prompt) :])


def accept(
    p: Tensor, q: Tensor, drafts: Sequence[int], generator: torch.Generator
) -> tuple[int, int]:
    """How many drafts are accepted, and the token that follows them.

    p (n + 1, V): the full chain's distributions for the n drafts and the token after them;
    q (n, V): those that the drafts were drawn from.
    """
    for i, x in enumerate(drafts):
        if torch.rand((), generator=generator, dtype=p.dtype) * q[i, x] >= p[i, x]:
            return i, draw((p[i] - q[i]).clamp(min=0), generator)
    return len(drafts), draw(p[-1], generator)


def speculate(
    chain: Decoder,
    short: Decoder,
    prompt: Sequence[int],
    count: int,
    ahead: int,
    sampler: Sampler,
    seed: int,
) -> Continuation:
    """`count` tokens after the prompt; `short` drafts up to `ahead` of them for each look."""
    generator = torch.Generator().manual_seed(seed)
    chain.cut(0)
    short.cut(0)
    tokens, end = list(prompt), len(prompt) + count
    out = Continuation([])
    while len(tokens) < end:
        look(chain, short, tokens, min(ahead, end - len(tokens) - 1), sampler, generator, out)
    out.tokens = tokens[len(prompt) :]
    return out


def look(
    chain: Decoder,
    short: Decoder,
    tokens: list[int],
    ahead: int,
    sampler: Sampler,
    generator: torch.Generator,
    out: Continuation,
) -> None:
    """Draft up to `ahead` tokens, let the chain look at them once, and add what it accepts."""
    length = len(tokens)
    # the window must not move between the first and the last token of a look
    room = window_start(length, chain.context) + chain.context - length
    n = min(ahead, room)
    drafts: list[int] = []
    q: list[Tensor] = []
    for _ in range(n):
        q.append(sampler.probabilities(short.logits([*tokens, *drafts])[0]).cpu())
        drafts.append(draw(q[-1], generator))
    p = sampler.probabilities(chain.logits([*tokens, *drafts], n + 1)).cpu()
    good, following = accept(p, torch.stack(q) if q else p[:0], drafts, generator)
    tokens += [*drafts[:good], following]
    out.drafted += n
    out.accepted += good
    for decoder in (chain, short):
        decoder.cut(len(tokens) - 1)
