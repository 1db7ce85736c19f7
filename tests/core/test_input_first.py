"""Backward in two steps equals one backward pass, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from treeprop_ray.config import Model
from treeprop_ray.core.input_first import forks_between, input_first
from treeprop_ray.models.gpt import Block as GptBlock
from treeprop_ray.models.vit import Block as VitBlock


class Twice(nn.Module):
    """One weight, used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(12, 12)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.map(torch.tanh(self.map(z)))
        return out


class Folded(nn.Module):
    """A weight made of two: both are behind the same fork."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(12, 12)), nn.Parameter(torch.randn(12, 12))

    def forward(self, z: Tensor) -> Tensor:
        return z + z @ (self.a * self.b)


BLOCKS = {
    "vit": lambda: VitBlock(12, 3, 2.0, 0.0),
    "gpt": lambda: GptBlock(Model(hidden=12, heads=3)),
    "mlp": lambda: nn.Sequential(nn.Linear(12, 12), nn.Sigmoid()),
    "twice": Twice,
    "folded": Folded,
    "frozen": lambda: nn.Linear(12, 12).requires_grad_(False),
    "none": nn.Tanh,
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_two_steps_equal_one(name: str, pieces: int) -> None:
    torch.manual_seed(0)
    block = BLOCKS[name]()
    inputs = torch.randn(pieces, 4, 5, 12)
    slopes = torch.randn(pieces, 4, 5, 12)

    def gradients(two_steps: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        block.zero_grad()
        found = []
        for x, slope in zip(inputs, slopes, strict=True):
            leaf = x.clone().requires_grad_()
            out = block(leaf)
            if two_steps:
                before = [None if p.grad is None else p.grad.clone() for p in block.parameters()]
                later = input_first(out, slope, leaf)
                if name != "twice":  # the weights' turn has not come yet
                    assert all(
                        _same(p.grad, b) for p, b in zip(block.parameters(), before, strict=True)
                    )
                later()
            else:
                out.backward(slope)
            assert leaf.grad is not None
            found.append(leaf.grad)
        return found, [p.grad for p in block.parameters()]

    (one, weights), (two, weights_two) = gradients(False), gradients(True)
    assert all(_same(a, b) for a, b in zip(one, two, strict=True))
    assert all(_same(a, b) for a, b in zip(weights, weights_two, strict=True))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def test_without_a_gradient_at_the_input_everything_waits() -> None:
    block, x = nn.Linear(3, 3), torch.randn(2, 3)
    later = input_first(block(x), torch.ones(2, 3), x)
    assert block.weight.grad is None
    later()
    assert block.weight.grad is not None


def test_forks_are_where_weights_come_in() -> None:
    block = VitBlock(12, 3, 2.0, 0.0)
    leaf = torch.randn(2, 5, 12, requires_grad=True)
    forks = forks_between(block(leaf), leaf)
    assert len(forks) == 6  # two norms, four linear maps
    assert {id(w) for found in forks.values() for w in found} == set(map(id, block.parameters()))
