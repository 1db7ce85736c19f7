"""draft=auto: which short path drafts, and how many tokens, by what is measured while decoding.

Decoding begins plainly. After some tokens every short path reads them in one call and says what it
would have drafted: with the chain's own distributions, which are there already, that gives the
acceptance of every path, position by position, without a draft. At best a draft costs the share of
blocks that its path has; the (path, length) that would then be fastest drafts if it promises
enough, else decoding goes on plainly. What a draft really costs (the chain's look at it as well) is
seen in the first looks, and the length follows that and the acceptance. Drafting that turns out no
faster than plain decoding ends, and is considered again later, ever more rarely and with what it
has cost.

An examination costs little more than a token, a trial that fails another two. Only tokens that are
there already decide, so the tokens are distributed as the full chain says.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from treeprop_ray.inference.decoding import (
    Continuation,
    Decoder,
    Sampler,
    draw,
    look,
    window_start,
)

TRIAL = 24  # tokens decoded plainly before drafts are considered
REST = 72  # tokens that must be left for that to pay
RARER = 5  # how much longer until they are considered again
PROMISE = 1.3  # speed over plain, at best, for drafting to begin; it will be less
PAYS = 1.02  # speed over plain for it to go on: keeping count costs a little too
LENGTHS = range(1, 11)  # of drafts
DOUBT = 8  # tokens, or looks, that expectations are held to count for
SEEN = 32  # looks that drafting is judged by
FIRST = 4  # looks before it is judged


class Offer(NamedTuple):
    """A path that could draft, and what that promises."""

    path: str
    ahead: int
    gain: float  # expected speed over plain decoding


NOBODY = Offer("", 0, 1.0)


@dataclass
class Times:
    """Seconds of plain decoding: a token, and of that the chain's call; what drafts cost beside."""

    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    calls: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    short: dict[str, float] = field(default_factory=dict)  # a call of each path, by its blocks
    more: float = 0.0  # for each draft beyond that, as looks have shown

    @property
    def plain(self) -> float:
        return statistics.median(self.tokens)

    @property
    def call(self) -> float:
        return statistics.median(self.calls)

    def each(self, path: str) -> float:
        """A draft of a path."""
        return self.short[path] + max(0.0, self.plain - self.call) + self.more

    def looks(self, path: str) -> list[float]:
        """A look at 0, 1, 2, … drafts of a path, and drafting them."""
        plain, each = self.plain, self.each(path)
        return [plain + n * each for n in (0, *LENGTHS)]


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Mean tokens of a look with 0, 1, 2, … drafts, when it begins at any of the positions whose
    acceptance is given. (Plain numbers: so few of them cost tensors more than a token's call.)"""
    totals, alive = [1.0], [1.0] * len(acceptance)
    for k in range(min(LENGTHS[-1], len(acceptance))):
        alive = [a * b for a, b in zip(alive, acceptance[k:], strict=False)]
        totals.append(totals[-1] + sum(alive) / len(alive))
    return totals


def best_offer(acceptance: Mapping[str, Sequence[float]], times: Times) -> Offer:
    """The path and length with the greatest expected speed."""
    offers, plain = [NOBODY], times.plain
    for path, seen in acceptance.items():
        # few tokens: the best of many guesses would promise too much
        held = [(a * len(seen) + 0.5 * DOUBT) / (len(seen) + DOUBT) for a in seen]
        both = zip(expected_tokens(held), times.looks(path), strict=False)
        gains = [tokens * plain / seconds for tokens, seconds in both]
        offers += [Offer(path, n, gain) for n, gain in enumerate(gains) if n]
    return max(offers, key=lambda offer: offer.gain)


@torch.inference_mode()
def opinions(
    shorts: Mapping[str, Decoder], tokens: Sequence[int], last: int
) -> Iterator[tuple[str, Tensor]]:
    """Logits of every path after each of the last tokens of the window, without caches; blocks that
    paths begin with in common run once."""
    (some, *_) = shorts.values()
    start = window_start(len(tokens), some.context)
    x = torch.tensor([tokens[start:]], device=some.stem.positions.device)
    states: dict[tuple[nn.Module, ...], Tensor] = {(): some.stem(x)}
    for name, decoder in shorts.items():
        key: tuple[nn.Module, ...] = ()
        for block in decoder.blocks:
            z, key = states[key], (*key, block)
            if key not in states:
                states[key] = block(z)
        h = decoder.head.features(states[key])
        yield name, nn.functional.linear(h[0, -last:], decoder.head.table_VD)


def consider(
    chain: Decoder,
    shorts: Mapping[str, Decoder],
    tokens: Sequence[int],
    recent: Sequence[Tensor],
    times: Times,
    sampler: Sampler,
) -> Offer:
    """What the short paths promise after these tokens; `recent`: the chain's distributions of the
    last of them."""
    p = torch.stack(list(recent))
    acceptance = {}
    for name, logits in opinions(shorts, tokens[:-1], len(p)):
        q = sampler.probabilities(logits).cpu()
        acceptance[name] = torch.minimum(p[-len(q) :], q).sum(-1).tolist()
    if not times.short:
        block = times.call / max(1, len(chain.blocks))
        times.short = {name: block * len(d.blocks) for name, d in shorts.items()}
    return best_offer(acceptance, times)


class Drafting:
    """A path that drafts, as long as that is faster than plain decoding."""

    def __init__(self, offer: Offer, times: Times) -> None:
        self.path, self.ahead, self.times = offer.path, offer.ahead, times
        self.expected = offer.gain * times.looks(offer.path)[offer.ahead] / times.plain
        self.looks: deque[tuple[int, int, float]] = deque(maxlen=SEEN)  # drafts, good, seconds

    def note(self, drafts: int, good: int, seconds: float) -> None:
        """A look is over; the length follows."""
        self.looks.append((drafts, good, seconds))
        times, plain = self.times, self.times.plain
        costs = [(s - plain) / n for n, _, s in self.looks if n]
        if len(costs) >= FIRST:
            more = times.more + statistics.median(costs) - times.each(self.path)
            times.more = max(0.0, more)
        if len(self.looks) >= DOUBT:
            right = sum(good for _, good, _ in self.looks)
            wrong = sum(good < drafts for drafts, good, _ in self.looks)
            a, tokens, speeds = (right + 1) / (right + wrong + 2), 1.0, {}
            for n, seconds_of_look in enumerate(self.times.looks(self.path)[1:], 1):
                tokens += a**n
                speeds[n] = tokens / seconds_of_look
            self.ahead = max(speeds, key=lambda n: speeds[n])

    @property
    def pays(self) -> bool:
        """Whether looks are faster than plain decoding; at first expectations count as well."""
        count = len(self.looks)
        if count < FIRST:
            return True
        doubt = DOUBT * (1 - count / SEEN)
        tokens = sum(good + 1 for _, good, _ in self.looks) + doubt * self.expected
        # medians here and there: a window that moves is read anew with drafts and without
        seconds = statistics.median(seconds for _, _, seconds in self.looks)
        return tokens / (count + doubt) * self.times.plain > PAYS * seconds


def decode_auto(
    chain: Decoder,
    shorts: Mapping[str, Decoder],
    prompt: Sequence[int],
    count: int,
    sampler: Sampler,
    seed: int,
) -> Continuation:
    """`count` tokens after the prompt, with drafts of short paths where they make it faster."""
    generator = torch.Generator().manual_seed(seed)
    for decoder in (chain, *shorts.values()):
        decoder.cut(0)
    tokens, end = list(prompt), len(prompt) + count
    out, times, wait = Continuation([]), Times(), TRIAL
    recent: list[Tensor] = []  # the chain's distributions of tokens decoded plainly
    drafting: Drafting | None = None
    while len(tokens) < end:
        began = time.perf_counter()
        if drafting:
            before, ahead = out.accepted, min(drafting.ahead, end - len(tokens) - 1)
            made = out.drafted
            look(chain, shorts[drafting.path], tokens, ahead, sampler, generator, out)
            seconds = time.perf_counter() - began
            drafting.note(out.drafted - made, out.accepted - before, seconds)
            if not drafting.pays:
                drafting, wait = None, RARER * wait
            continue
        logits = chain.logits(tokens)[0]
        called = time.perf_counter()
        recent.append(sampler.probabilities(logits).cpu())
        tokens.append(draw(recent[-1], generator))
        times.tokens.append(time.perf_counter() - began)
        times.calls.append(called - began)
        if shorts and len(recent) >= wait and end - len(tokens) >= REST:
            offer = consider(chain, shorts, tokens, recent[-TRIAL:], times, sampler)
            if offer.path and offer.gain >= PROMISE:
                drafting = Drafting(offer, times)
                out.drafters.append(f"{offer.path} x {offer.ahead}")
            else:
                wait *= RARER
            recent.clear()
    out.tokens = tokens[len(prompt) :]
    return out
