"""Several layers in one block: the same chain, other trees."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Affine, engine_of
from torch import nn

from treeprop_ray import TreeNetwork, config, data, methods
from treeprop_ray.core.grouping import deepest, even, grouping, longest_line, sizes_of
from treeprop_ray.core.network import STEM, Shape
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.inference.decoding import Decoder
from treeprop_ray.models import blueprint, hf
from treeprop_ray.schedule.cost import chain_cost, tree_cost

GPT = ["experiment=text_small", "model.hidden=12", "model.heads=2"]
VIT = ["experiment=cifar10_vit_small", "model.hidden=12", "model.heads=2"]
MLP = ["model.hidden=6"]
SHAPES = {
    "gpt": Shape((8,), 256, torch.float32),
    "vit": Shape((3, 16, 16), 10, torch.float32),
    "mlp": Shape((1, 8, 8), 10, torch.float32),
}


def network_of(words: list[str]) -> TreeNetwork:
    settings = config.load(words)
    recipe = blueprint(settings, SHAPES[settings.model.name])
    return TreeNetwork.from_blueprint(recipe, recipe.tree(settings.split), 1)  # type: ignore


@pytest.mark.parametrize("words", [GPT, VIT, MLP], ids=["gpt", "vit", "mlp"])
def test_the_chain_is_the_one_without_groups(words: list[str]) -> None:
    """Names, initial weights and outputs of its layers, whatever the blocks of the tree are."""
    plain = network_of(words).chain()
    coarse = network_of([*words, "model.group=[2,2,3]", "model.auxiliary_layers=2"])
    chain = coarse.chain()
    assert [name for name, _ in chain.named_children()] == [
        name for name, _ in plain.named_children()
    ]
    for key, value in plain.state_dict().items():
        assert torch.equal(chain.state_dict()[key], value), key
    short = [name for name, _ in coarse.path([0, 2, 3, 4]).named_children()]
    assert short == ["stem", "0-2", "2-4", "4-5", "5-6", "6-7", "7-8"]
    assert coarse.tree.N == 4 and len(coarse.parts()) == 6  # stem, 4 of the chain, 0-2


def test_paths_of_a_language_model_are_gpt2_and_decode() -> None:
    """Hugging Face's files of the chain are those of the network without groups; a short path has
    its layers, and continues a text with its cache as it reads it at once."""
    coarse = [*GPT, "model.group=[2,2,3]", "model.auxiliary_layers=2"]
    model, network = config.load(coarse).model, network_of(coarse)
    about, state = hf.state_of(network.chain(), model)
    _, plain = hf.state_of(network_of(GPT).chain(), model)
    assert about["n_layer"] == 7 and state.keys() == plain.keys()
    assert all(torch.equal(state[key], value) for key, value in plain.items())
    path = network.path([0, 2, 3, 4])
    assert hf.state_of(path, model)[0]["n_layer"] == 5
    decoder, tokens = Decoder(path), [3, 1, 4, 1, 5]
    decoder.logits(tokens[:3])
    with torch.no_grad():
        whole = path(torch.tensor([tokens]))[0, -1]
    assert torch.allclose(decoder.logits(tokens)[0], whole, atol=1e-5)


def test_sizes() -> None:
    assert sizes_of([], 3) == [1, 1, 1]
    assert sizes_of([2], 7) == [2, 2, 3]
    assert sizes_of([9], 7) == [7]
    assert sizes_of([1, 6], 7) == [1, 6]
    with pytest.raises(UserError, match="has 4 layers, must have the 7"):
        sizes_of([2, 2], 7)
    assert grouping([1, 1]) is None
    assert even(10, 4) == [2, 2, 3, 3]


def test_auxiliary_layers_stop_at_those_of_the_chain() -> None:
    chosen = grouping([1, 1, 1, 1, 1, 1, 1], 3)
    assert chosen is not None
    assert chosen.layers((0, 4)) == [(0, 1), (1, 2), (2, 4)]
    assert chosen.layers((0, 2)) == [(0, 1), (1, 2)]
    assert chosen.layers((4, 8)) == chosen.layers((7, 8)) == [(7, 8)]


@pytest.mark.parametrize("split", ["floor", "right_full"])
def test_the_longest_line_bounds_the_schedule(split: str) -> None:
    """Forward and backward through it are the critical path of the real calls, or more where
    blocks differ much: a node need not wait for its parent's."""
    rule = Rule(objective="node")
    for sizes, auxiliary in itertools.product(
        ([1] * 7, [2, 2, 3], [3, 1, 4, 1, 5], [7], [1] * 12, [5, 1, 1, 1]), (1, 2, 4)
    ):
        chosen = grouping(sizes, auxiliary)
        tree = Tree(len(sizes) + 1, split, chosen)
        path, line = tree_cost(tree, rule).path, longest_line(tree)
        assert path <= 2 * line, (sizes, auxiliary)
        assert path == 2 * line or max(sizes) - min(sizes) > 1, (sizes, auxiliary)


def test_costs_of_a_step() -> None:
    fine = tree_cost(Tree(8), Rule(objective="node"))
    assert (fine.work, fine.path, fine.trained, fine.fullest) == (24, 8, 12, 2)
    coarse = Tree(4, "floor", grouping([2, 2, 3], 2))
    cost = tree_cost(coarse, Rule(objective="node"))
    assert (cost.work, cost.path, cost.trained, cost.fullest) == (20, 12, 10, 4)
    assert chain_cost(coarse) == chain_cost(Tree(8))
    assert tree_cost(Tree(8), Rule(objective="final_ce")).work == 16
    settings = config.load(["model.group=2", "model.auxiliary_layers=2"])
    applications = methods.of(settings).outline(settings, coarse).applications
    assert 2 * applications == tree_cost(coarse, Rule.of(settings, "bernoulli")).work


def test_the_deepest_tree_within_a_span() -> None:
    for layers, auxiliary, share in ((7, 1, 0.7), (12, 2, 0.7), (24, 3, 0.6)):
        chosen = deepest(layers, auxiliary, share, "floor")
        assert chosen is not None
        best = Tree(chosen.N, "floor", chosen)
        assert longest_line(best) <= share * (layers + 1)
        for blocks in range(1, layers + 1):
            tree = Tree(blocks + 1, "floor", grouping(even(layers, blocks), auxiliary))
            if longest_line(tree) <= share * (layers + 1):
                assert spine(tree) <= spine(best)
    settings = config.load(["model.span=0.7"])
    assert methods.of(settings).tree(settings).grouping == deepest(7, 1, 0.7, "floor")


def spine(tree: Tree) -> int:
    return sum(map(tree.layers, tree.path_edges(tree.spine_paths[-1])))


@pytest.mark.parametrize(
    "words",
    [
        ["model.group=[2,2]"],
        ["model.group=0"],
        ["model.group=2.5"],
        ["model.auxiliary_layers=0"],
        ["model.span=0.5", "model.group=2"],
        ["experiment=digits_gru", "model.group=2"],
        ["experiment=digits_gru", "model.span=0.5"],
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"model\.(group|auxiliary_layers|span)"):
        config.load(words)


def trained(words: list[str], steps: int = 3) -> Any:
    settings = config.load(["batch=32", *words])
    engine = engine_of(settings, data.load(settings), steps)
    for step in range(steps):
        engine.step(step, report=False)
    return engine.state()[0]


def test_backpropagation_does_not_care() -> None:
    """The layers of the chain get the same updates; only where they are kept is another."""
    words = ["method=bp", *MLP, "lr=0.01"]
    plain = trained(words)
    coarse = {
        name: value for key, value in trained([*words, "model.group=3"]).items()
        for name in [key.partition("/")[2].replace(".", "/", 1)]
    }  # fmt: skip
    for key, value in plain.items():
        if key.startswith("7-8"):
            continue
        assert torch.equal(coarse[key], value), key


def test_runs_of_groups_are_exported_layer_by_layer(command: Any, tmp_path: Path) -> None:
    """The exported program of a path gives what the path gives; --cfg says what a step costs."""
    words = [*MLP, "model.group=[2,2,3]", "model.auxiliary_layers=2", "batch=512", "epochs=1",
             "objective=node", "alpha=1", "beta=0"]  # fmt: skip
    done = command("train", *words, f"out={tmp_path}", "name=run", "engine=local")
    assert done.code == 0, done.err
    assert "layers" in done.out and "spine-2         5" in done.out
    for path, names in (("full", "0-1 1-2 2-3 3-4 4-5 5-6 6-7 7-8"), ("spine-1", "0-2 2-4 7-8")):
        target = tmp_path / path
        assert (
            command("export", f"run={tmp_path / 'run'}", f"path={path}", f"to={target}").code == 0
        )
        state = torch.load(target / "model.pt", weights_only=True)
        assert {key.partition(".")[0] for key in state} == set(names.split())
        # by hand: sigmoid layers one after another
        x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        z = x.flatten(1)
        for name in names.split()[:-1]:
            z = torch.sigmoid(
                nn.functional.linear(z, state[f"{name}.0.weight"], state[f"{name}.0.bias"])
            )
        z = nn.functional.linear(z, state["7-8.weight"], state["7-8.bias"])
        program = torch.export.load(target / "model.pt2").module()
        assert torch.allclose(program(x), z, atol=1e-6)
    shown = command("train", *words, "--cfg").out
    assert "in blocks of 2, 2, 3" in shown and "critical path 12 (75 % of 16)" in shown


def test_own_blocks_in_groups() -> None:
    """Layers of several shapes; auxiliary ones are made for the states of single layers."""
    widths = [4, 4, 6, 6, 3]
    layers = [Affine(a, b, "gaussian").double() for a, b in itertools.pairwise(widths)]
    asked: list[tuple[int, int]] = []

    def auxiliary(l: int, r: int) -> nn.Module:
        asked.append((l, r))
        return Affine(widths[l], widths[r], "gaussian").double()

    network = TreeNetwork.from_blocks(
        nn.Linear(5, 4).double(),
        layers,
        nn.Linear(3, 2).double(),
        example=torch.zeros(2, 5, dtype=torch.float64),
        group=[1, 2, 1],
        auxiliary_layers=2,
        auxiliary=auxiliary,
        exits={2: nn.Linear(6, 3).double()},
    )
    assert network.tree.N == 4 and asked == [(0, 1), (1, 3)]
    assert list(network.chain())[1:-1] == layers
    assert STEM in network.parts()
    with pytest.raises(UserError, match="has 3 layers, must have the 4"):
        TreeNetwork.from_blocks(
            None, layers, nn.Linear(3, 2).double(), example=torch.zeros(2, 4).double(), group=[1, 2]
        )
