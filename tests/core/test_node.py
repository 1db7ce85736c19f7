"""Randomness inside a node depends on step, node, side and piece, and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from treeprop_ray.core.node import TreeNode
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Tree


def seeds(step: int, n: int = 2, index: int = 0, seed: int = 1) -> list[int]:
    """The seeds with which the two blocks of a node are run, if they may draw."""
    tree = Tree(8)
    drawn: list[int] = []

    def run(block: nn.Module, z: torch.Tensor, key: int) -> torch.Tensor:
        drawn.append(key)
        return block(z)

    parts = (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)) for _ in range(2))
    node = TreeNode(tree, tree.nodes[n], *parts, Rule(seed=seed), True, run)
    piece = Piece(step, index, 0, 2, 2)
    node.lift(torch.ones(2, 3), piece)
    node.answer(torch.ones(2, 3), piece)
    return drawn


def test_every_block_of_every_step_and_piece_has_a_seed_of_its_own() -> None:
    cases = itertools.product((0, 1, 7), (1, 2, 3), (0, 1), (1, 2))
    drawn = [key for case in cases for key in seeds(*case)]
    assert len(set(drawn)) == len(drawn)
    assert seeds(3) == seeds(3)


@pytest.mark.parametrize("places", [(0, 2), (2, 4)])
def test_noise_of_a_sample_is_that_of_its_place(places: tuple[int, int]) -> None:
    tree = Tree(4)
    rule = Rule(sigma=1.0)

    def state(start: int, stop: int) -> torch.Tensor:
        block = nn.Linear(3, 3)
        nn.init.zeros_(block.weight)
        nn.init.zeros_(block.bias)
        node = TreeNode(tree, tree.nodes[1], block, block, rule, True, lambda b, z, key: b(z))
        piece = Piece(5, 0, start, stop, 4)
        node.lift(torch.ones(stop - start, 3), piece)
        return node.settle(piece)

    assert torch.equal(state(*places), state(0, 4)[slice(*places)])


def test_a_block_that_gives_its_input_no_gradient_is_named_for_it() -> None:
    class Cut(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.detach())

    tree, piece = Tree(4), Piece(0, 0, 0, 2, 2)
    node = TreeNode(
        tree, tree.nodes[1], nn.Linear(3, 3), Cut(3, 3), Rule(), True, lambda b, z, _: b(z)
    )
    node.lift(torch.ones(2, 3), piece)
    with pytest.raises(RuntimeError, match="the block gives no gradient to its input"):
        node.answer(torch.ones(2, 3), piece)
