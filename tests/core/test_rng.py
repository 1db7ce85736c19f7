"""Draws depend on names, numbers and places, each of which counts."""

from __future__ import annotations

import itertools

import torch

from treeprop_ray.core.rng import derive, normal_rows


def test_words_that_run_together_have_seeds_of_their_own() -> None:
    """Step 1 of node 11 is not step 11 of node 1."""
    pairs = list(itertools.product(range(13), repeat=2))
    assert len({derive(0, "noise", *pair) for pair in pairs}) == len(pairs)
    assert derive("a", "bc") != derive("ab", "c")


def test_every_place_has_a_row_of_its_own_however_the_batch_is_cut() -> None:
    whole = normal_rows(torch.empty(6, 3), range(6), 1, "noise", 2)
    assert len({tuple(row.tolist()) for row in whole}) == 6
    part = normal_rows(torch.empty(2, 3), range(4, 6), 1, "noise", 2)
    assert torch.equal(part, whole[4:])
