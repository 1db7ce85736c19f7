"""Frozen parts: which are meant, that they stay, and that all others learn as if they did not."""

from __future__ import annotations

import pytest
import torch
from conftest import engine_of, tiny_network
from torch import Tensor

from treeprop_ray import config, data, fit
from treeprop_ray.core.frozen import frozen_parts, still_in_chain, still_in_tree
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError

TREE = Tree(8, "floor")
NAMES = ["stem", *(f"{l}-{r}" for l, r in TREE.blocks)]
SMALL = ["model.hidden=8", "batch=32"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["stem", "0-1"], "stem 0-1"),
        (["0-4"], "0-4"),  # the part of that name, not a range
        (["0..4"], "0-1 1-2 2-3 3-4"),
        (["6..8"], "6-7 7-8"),
        (["head"], "7-8"),
        (["4-*"], "4-5 4-6"),
        ([], ""),
    ],
)
def test_words_mean_parts(words: list[str], parts: str) -> None:
    assert frozen_parts(words, NAMES, TREE) == set(parts.split())


@pytest.mark.parametrize("word", ["0-3", "heat", "4..4", "9..12"])
def test_a_word_that_means_no_part_is_an_error(word: str) -> None:
    with pytest.raises(UserError, match=rf"^freeze=\[{word}\]: means no part; parts are stem, "):
        frozen_parts([word], NAMES, TREE)


def test_a_state_is_still_while_nothing_before_it_trains() -> None:
    every = set(NAMES)
    assert still_in_tree(TREE, every) == still_in_chain(TREE, every) == frozenset()
    assert still_in_tree(TREE, every - {"stem", "0-4", "0-2"}) == {0, 2, 4}
    assert still_in_tree(TREE, every - {"0-4", "0-2"}) == frozenset()
    assert still_in_chain(TREE, every - {"stem", "0-1", "1-2", "5-6"}) == {0, 1, 2}


def gradients(words: list[str]) -> dict[str, Tensor]:
    settings = config.load([*SMALL, *words])
    engine = engine_of(settings, data.load(settings), 20)
    engine.gradients(0)
    engine.host.catch_up()
    return {
        f"{name}/{key}": p.grad
        for name, module in engine.host.parts.items()
        for key, p in module.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize(
    "words",
    [
        ["objective=node_all_ce"],
        ["model.activation=tanh", "beta=0.5", "sigma=0.05", "microbatches=2"],
        ["model.activation=tanh", "beta=0.5", "correction=vjp", "recompute=true"],
        ["detach_levels=true"],
        ["method=bp"],
    ],
)
@pytest.mark.parametrize("freeze", ["0..3", "4..8", "1-2,5-6", "0-1,7-8"])
def test_the_others_learn_as_if_nothing_were_frozen(words: list[str], freeze: str) -> None:
    whole, rest = gradients(words), gradients([*words, f"freeze=[{freeze}]"])
    names = [f"{i}-{i + 1}" for i in range(8)] if "method=bp" in words else NAMES
    frozen = frozen_parts(freeze.split(","), names, TREE)
    assert rest.keys() == {key for key in whole if key.split("/")[0] not in frozen}
    assert all(torch.equal(rest[key], whole[key]) for key in rest)


@pytest.mark.parametrize("method", ["tree", "bp", "cff"])
@pytest.mark.parametrize("freeze", ["0..3", "head", "0..7"])
def test_frozen_parts_stay_and_have_no_optimizer_state(method: str, freeze: str) -> None:
    settings = config.load([*SMALL, f"method={method}", f"freeze=[{freeze}]", "cff.head_share=0.5"])
    engine = engine_of(settings, data.load(settings), 6)
    before = engine.state()[0]
    for step in range(6):
        engine.step(step, report=True)
    after, slots = engine.state()
    frozen = frozen_parts([freeze], NAMES, TREE)
    for key, value in after.items():
        assert torch.equal(value, before[key]) == (key.split("/")[0] in frozen), key
    owners = {key.split("/")[0] for key in slots} - {"cff"}  # cff: its best validation loss
    assert owners == {key.split("/")[0] for key in after} - frozen


def test_nothing_left_to_train_is_one_line() -> None:
    settings = config.load([*SMALL, "method=bp", "freeze=[0..8]"])  # this stem has no weights
    with pytest.raises(UserError, match="leaves nothing to train"):
        engine_of(settings, data.load(settings), 6)


def test_fit_takes_parameters_that_the_user_froze() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.randint(3, (32,))
    network = tiny_network(5)
    network.stem.requires_grad_(False)
    network.edges["0-2"].requires_grad_(False)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    fit(network, x, y, epochs=2, batch=16, freeze=["0-1"])
    changed = {k for k, v in network.state_dict().items() if not torch.equal(v, before[k])}
    kept = ("stem.", "edges.0-2.", "edges.0-1.")
    assert changed == {k for k in before if not k.startswith(kept)}
    assert all(p.requires_grad for p in network.edges["0-1"].parameters())  # only in that call
