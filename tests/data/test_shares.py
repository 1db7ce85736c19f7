"""A copy of the boundary reads its rows of a batch, and no others where that changes nothing."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from treeprop_ray.data import Batches
from treeprop_ray.data.own import own_set
from treeprop_ray.data.reading import drawing

ROWS = torch.tensor([2, 3, 4])


class Counted:
    """A map-style set that remembers what was read of it."""

    def __init__(self, draws: bool = False, label: object = 1) -> None:
        self.read: list[int] = []
        self.draws, self.label = draws, label

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, object]:
        self.read.append(i)
        return torch.tensor([float(i), random.random() if self.draws else 0.0]), self.label


def batches(samples: object) -> Batches:
    return Batches(own_set({"train": samples}, None, 6, 3, 1), 6, seed=1, steps=2)


def test_only_the_own_rows_are_read() -> None:
    samples = Counted()
    mine, whole = batches(samples), batches(Counted())
    mine.some(0, ROWS)
    samples.read.clear()
    x, y, labels = mine.some(0, ROWS)
    assert labels is None
    assert torch.equal(x, whole(0)[0][ROWS])
    assert torch.equal(y, whole(0)[1][ROWS])
    mine.some(1, ROWS)
    mine.close()
    assert len(samples.read) <= 3  # of step 1; it may have been read ahead
    whole.close()


def test_rows_may_be_asked_for_twice() -> None:
    mine, whole = batches(Counted()), batches(Counted())
    rows = torch.tensor([4, 5, 0, 1, 4])
    assert torch.equal(mine.some(1, rows)[0], whole(1)[0][rows])
    mine.close()
    whole.close()


@pytest.mark.parametrize("samples", [Counted(draws=True), Counted(label=[1, 2])])
def test_what_depends_on_other_rows_is_read_whole(samples: Counted) -> None:
    """Random samples, whose draws follow each other; labels of which some may not count."""
    mine, whole = batches(samples), batches(Counted(samples.draws, samples.label))
    for step in range(2):
        x, _, labels = mine.some(step, ROWS)
        assert labels is not None
        assert torch.equal(x, whole(step)[0][ROWS])
        assert torch.equal(labels, whole(step)[1])
    mine.close()
    whole.close()


def test_class_weights_need_all_labels() -> None:
    mine = batches(Counted())
    assert mine.some(0, ROWS, all_labels=True)[2] is not None
    mine.close()


def test_draws_are_noticed() -> None:
    with drawing(1) as drew:
        torch.zeros(2)
    assert not drew()
    for draw in (lambda: torch.rand(1), random.random):
        with drawing(1) as drew:
            draw()
        assert drew()
