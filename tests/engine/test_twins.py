"""Copies of a host tell each other what they should, directly or by way of others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from treeprop_ray.engine.twins import LARGE, Ring

Packets = dict[tuple[int, int], "SimpleQueue[list[Tensor | None]]"]


class Post:
    """A wire inside one process, which counts what one end sends."""

    def __init__(self, packets: Packets, rank: int) -> None:
        self.packets, self.rank, self.sent = packets, rank, 0

    def send(self, peer: int, tensors: Sequence[Tensor | None]) -> None:
        self.sent += 1
        self.packets[self.rank, peer].put([None if t is None else t.clone() for t in tensors])

    def take(self, peer: int) -> list[Tensor | None]:
        return self.packets[peer, self.rank].get(timeout=30)


def value(giver: int, taker: int) -> Any:
    """What one copy has for another, as gradients and losses are told."""
    if giver == taker:
        return None, {}
    numbers = torch.arange(LARGE + 3.0) * giver + taker
    return ((giver, taker), {"f": numbers, "b": numbers[:5].bfloat16()}), {taker: float(giver)}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return bool(one == other)


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("count", [2, 3, 5, 8, 13])
def test_every_copy_hears_what_is_meant_for_it(count: int, relays: bool) -> None:
    packets: Packets = defaultdict(SimpleQueue)
    ranks = [7 + 3 * k for k in range(count)]
    posts = [Post(packets, rank) for rank in ranks]
    rings = [Ring(posts[k], ranks, k, relays) for k in range(count)]

    def speak(k: int) -> tuple[list[Any], list[Any]]:
        dealt = rings[k].deal([value(k, other) for other in range(count)])
        return dealt, rings[k].tell(value(k, -1))

    with ThreadPoolExecutor(count) as pool:
        heard = list(pool.map(speak, range(count)))
    for k, (dealt, told) in enumerate(heard):
        others = [j for j in range(count) if j != k]
        assert same(tuple(dealt), tuple(value(j, k) for j in others))
        assert same(tuple(told), tuple(value(j, -1) for j in others))
    rounds = (count - 1).bit_length() if relays else count - 1
    assert {post.sent for post in posts} == {2 * rounds}
