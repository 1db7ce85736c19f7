"""Copies of all hosts, each with its share of the batch. Pure Python, no torch, no Ray.

With replicas=R a step is cut into R times as many pieces, and copy k of the hosts runs its run of
them. N = 8 on two hosts, R = 2, one piece each:

    copy 0   host 0   piece 0: open F4 …          hand out ─┐ add up   take, update
             host 1   piece 0: F2 FB1 …           hand out ─┼─┐ …
    copy 1   host 2   piece 1: open F4 …          hand out ─┘ │ …      (the twin of host 0)
             host 3   piece 1: F2 FB1 …           hand out ───┘ …      (the twin of host 1)

A piece's noise, dropout and losses depend on its number and its places alone, so only sums over
pieces cross from copy to copy. Each knows where it stands in the order of one process (`order`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treeprop_ray.schedule.ops import Call


@dataclass(frozen=True)
class Copy:
    """Which copy of a host this is."""

    index: int = 0
    of: int = 1
    exact: bool = True  # sums are in the order of one process; else by an all-reduce
    shards: bool = False  # it updates its share of the parameters, and gets the others

    def places(self, total: int) -> range:
        """Its run of the places of a batch."""
        return range(total * self.index // self.of, total * (self.index + 1) // self.of)


def copied(calls: Sequence[Call], hosts: int, copies: int, pieces: int) -> list[Call]:
    """The calls of all copies of `hosts` hosts, out of those that one copy would do with all
    pieces; copy k's hosts follow those of copy k - 1."""
    if copies == 1:
        return list(calls)
    each = pieces // copies
    counts = [0] * hosts
    runs: list[list[Call]] = [[] for _ in range(copies)]
    for call in calls:
        k = call.piece // each
        runs[k].append(replace(call, host=k * hosts + call.host, order=counts[call.host]))
        counts[call.host] += len(call.ops)
    rounds = itertools.zip_longest(*runs)  # all copies begin at the same time
    return [call for together in rounds for call in together if call is not None]
