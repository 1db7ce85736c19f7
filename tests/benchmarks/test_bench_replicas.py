"""bench replicas: copies take as long as one, if only sleeping takes time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from treeprop_ray.benchmarks.replicas import chain_of, tree_of
from treeprop_ray.benchmarks.span import as_the_paper
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.copies import copied
from treeprop_ray.schedule.ops import Call


def length(calls: Sequence[Call], hosts: int, copies: int, blocks: int) -> float:
    awake, there = [0.0] * (hosts * copies), dict[tuple[int, str], float]()
    for call in copied(calls, hosts, copies, copies):
        inputs = [there[call.piece, name] for name in call.inputs]
        start = max([awake[call.host], *inputs])
        awake[call.host] = start + partial(as_the_paper, 1.0, blocks)(call)
        there.update({(call.piece, name): awake[call.host] for name in call.outputs})
    return max(awake)


@pytest.mark.parametrize("copies", [1, 3, 16])
@pytest.mark.parametrize("N", [8, 32])
def test_copies_do_not_wait_for_each_other(N: int, copies: int) -> None:
    assert length(*tree_of(N, copies), blocks=0) == 2 * Tree(N).depth
    assert length(*chain_of(N, copies), blocks=1) == 2 * N
