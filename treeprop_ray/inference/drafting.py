"""draft=auto: which short path drafts, and how many tokens, by what is measured while decoding.

Decoding begins plainly. After some tokens every short path reads them in one call and says what it
would have drafted: with the chain's own distributions, which are there already, that gives the
acceptance of every path, position by position, without a draft. A draft costs a plain token without
the blocks that its path leaves out; the (path, length) that would then be fastest drafts if it
promises enough, else decoding goes on plainly. What a look costs beyond that is seen in the first
looks, and the length follows that and the acceptance. Drafting that turns out no faster than plain
decoding ends, and is considered again later, ever more rarely and with what it has cost.

All this may lose a small share of the time that the text takes plainly (SHARE), and no more: an
examination or a look that could lose more than what is left of it is not begun, so short texts are
decoded plainly. What drafts gain is added to it. Only tokens that are there already decide, so the
tokens are distributed as the full chain says.
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
RARER = 5  # how much longer until they are considered again
SHARE = 0.015  # of the text's plain time, that may be lost
EXAMINATION = 2.0  # plain tokens that the first one may cost; later ones by what it has
LOOK = 0.5  # plain tokens that a look costs beside its drafts, until looks have shown
PROMISE = 1.15  # speed over plain that is expected for drafting to begin
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
    """Seconds of plain decoding: a token, and of that in blocks; what looks cost beside drafts."""

    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    blocks: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    shares: dict[str, float] = field(default_factory=dict)  # of the chain's blocks, for each path
    seen: float | None = None  # the cost of a look beside its drafts

    @property
    def plain(self) -> float:
        return statistics.median(self.tokens)

    @property
    def look(self) -> float:
        return LOOK * self.plain if self.seen is None else self.seen

    def each(self, path: str) -> float:
        """A draft of a path."""
        return self.plain - (1 - self.shares[path]) * statistics.median(self.blocks)

    def looks(self, path: str) -> list[float]:
        """A look at 0, 1, 2, … drafts of a path, and drafting them."""
        plain, each, more = self.plain, self.each(path), self.look
        return [plain, *(plain + more + n * each for n in LENGTHS)]


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
    count = max(1, len(chain.blocks))
    times.shares = {name: len(d.blocks) / count for name, d in shorts.items()}
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
        times, each = self.times, self.times.each(self.path)
        beside = [s - times.plain - n * each for n, _, s in self.looks if n]
        if len(beside) >= FIRST:
            times.seen = max(0.0, statistics.median(beside))
        if len(self.looks) >= DOUBT:
            right = sum(good for _, good, _ in self.looks)
            wrong = sum(good < drafts for drafts, good, _ in self.looks)
            a, tokens, speeds = (right + 1) / (right + wrong + 2), 1.0, {}
            for n, seconds_of_look in enumerate(times.looks(self.path)[1:], 1):
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
    purse, examination = SHARE * count, EXAMINATION  # in plain tokens
    recent: list[Tensor] = []  # the chain's distributions of tokens decoded plainly
    drafting: Drafting | None = None
    while len(tokens) < end:
        began = time.perf_counter()
        if drafting:
            before, ahead = len(tokens), min(drafting.ahead, end - len(tokens) - 1)
            drafted, good = out.drafted, out.accepted
            look(chain, shorts[drafting.path], tokens, ahead, sampler, generator, out)
            seconds = time.perf_counter() - began
            purse += len(tokens) - before - seconds / times.plain
            drafting.note(out.drafted - drafted, out.accepted - good, seconds)
            if purse < 0 or not drafting.pays:
                drafting, wait = None, RARER * wait
            continue
        logits = chain.logits(tokens)[0]
        recent.append(sampler.probabilities(logits).cpu())
        tokens.append(draw(recent[-1], generator))
        times.tokens.append(time.perf_counter() - began)
        times.blocks.append(chain.in_blocks)
        if shorts and len(recent) >= wait and purse >= examination:
            began = time.perf_counter()
            offer = consider(chain, shorts, tokens, recent[-TRIAL:], times, sampler)
            examination = (time.perf_counter() - began) / times.plain
            purse -= examination
            if offer.path and offer.gain >= PROMISE:
                drafting = Drafting(offer, times)
                out.drafters.append(f"{offer.path} x {offer.ahead}")
            else:
                wait *= RARER
            recent.clear()
    out.tokens = tokens[len(prompt) :]
    return out
