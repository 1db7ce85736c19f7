"""Draws depend on names, numbers and places, each of which counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from treeprop_ray.core.rng import QUIET, derive, draws, normal_rows


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


@pytest.mark.parametrize("kind", sorted(QUIET, key=lambda kind: kind.__name__))
def test_who_is_said_to_draw_nothing_draws_nothing(kind: type[nn.Module]) -> None:
    words: dict[type[nn.Module], tuple[Any, ...]] = {
        nn.Sequential: (nn.Linear(6, 6),), nn.ModuleList: ([],), nn.Unflatten: (1, (2, 3)),
        nn.Linear: (6, 6), nn.Conv1d: (4, 4, 1), nn.Conv2d: (4, 4, 1), nn.Embedding: (9, 2),
        nn.LayerNorm: (6,), nn.GroupNorm: (2, 4), nn.AvgPool2d: (2,), nn.MaxPool2d: (2,),
        nn.Softmax: (-1,),
    }  # fmt: skip
    module = kind(*words.get(kind, ()))
    assert not draws(nn.Sequential(module))
    shapes = dict.fromkeys((nn.Conv2d, nn.AvgPool2d, nn.MaxPool2d), (3, 4, 6, 6))
    shapes |= dict.fromkeys((nn.Conv1d, nn.GroupNorm), (3, 4, 6))
    x = torch.ones(shapes.get(kind, (3, 6)))
    before = torch.get_rng_state()
    if kind is not nn.ModuleList:
        module(x.long() if kind is nn.Embedding else x)
    assert torch.equal(before, torch.get_rng_state())


def test_what_may_draw_is_seeded() -> None:
    class Own(nn.Linear):
        pass

    hooked, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = torch.rand_like  # type: ignore[method-assign]
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    for module in (nn.Dropout(0.0), nn.RReLU(), Own(2, 2), hooked, patched, normed):
        assert draws(nn.Sequential(nn.Linear(2, 2), module)), module
