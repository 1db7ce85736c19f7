from typing import Any

import pytest
import torch
from torch import nn

from treeprop_ray import TreeNetwork, config, fit
from treeprop_ray.errors import UserError
from treeprop_ray.models import mlp

X = torch.randn(6, 5)


class Named(nn.Module):
    def forward(self, z: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"z": z}


def blocks(k: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(k)]


def network(**kwargs: object) -> TreeNetwork:
    return TreeNetwork.from_blocks(None, blocks(), nn.Linear(5, 3), example=X, **kwargs)


def test_chain_is_the_users_blocks_in_order_as_a_plain_sequential() -> None:
    stem, own, head = nn.Linear(5, 5), blocks(), nn.Linear(5, 3)
    tree = TreeNetwork.from_blocks(stem, own, head, example=X)
    chain = tree.chain()
    assert type(chain) is nn.Sequential
    assert list(chain) == [stem, *own, head]
    torch.testing.assert_close(tree(X), nn.Sequential(stem, *own, head)(X))


def test_a_sequential_is_a_list_of_blocks() -> None:
    own = nn.Sequential(*blocks())
    tree = TreeNetwork.from_blocks(None, own, nn.Linear(5, 3), example=X)
    assert list(tree.chain())[1:-1] == list(own)


def test_auxiliary_blocks_are_fresh_copies() -> None:
    tree = network()
    auxiliary = [e for e in tree.tree.blocks if e[1] - e[0] > 1]
    assert auxiliary
    originals = [tree.block((i, i + 1))[0].weight for i in range(4)]
    for edge in auxiliary:
        weight = tree.block(edge)[0].weight
        assert all(not torch.equal(weight, w) for w in originals)


def test_auxiliary_blocks_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = network(seed=5)
    torch.manual_seed(1)
    second = network(seed=5)
    edge = next(e for e in first.tree.blocks if e[1] - e[0] > 1)
    assert torch.equal(first.block(edge)[0].weight, second.block(edge)[0].weight)


def test_a_factory_makes_the_auxiliary_blocks() -> None:
    made = []

    def factory(l: int, r: int) -> nn.Module:
        made.append((l, r))
        return nn.Linear(5, 5)

    tree = network(auxiliary=factory)
    assert sorted(made) == [e for e in tree.tree.blocks if e[1] - e[0] > 1]


def test_auxiliary_blocks_follow_changing_shapes() -> None:
    own = [nn.Linear(5, 5), nn.Linear(5, 7), nn.Linear(7, 7)]
    tree = TreeNetwork.from_blocks(None, own, nn.Linear(7, 3), example=X)
    for edge in tree.tree.blocks:
        block = tree.block(edge)
        assert block.in_features == (5 if edge[0] < 2 else 7)


@pytest.mark.parametrize(
    ("own", "head", "message"),
    [
        ([nn.Linear(5, 5), nn.Linear(4, 5)], nn.Linear(5, 3), "block 2: does not take"),
        ([nn.Linear(5, 5)], nn.Linear(4, 3), "head: does not take an input of shape"),
        ([], nn.Linear(5, 3), "at least one block"),
        ([Named()], nn.Linear(5, 3), "block 1: returns z; the state must be named"),
        (
            [nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 8)],
            nn.Linear(8, 3),
            r"auxiliary block 0-2: no block maps shape \(6, 5\) to \(6, 7\)",
        ),
    ],
)
def test_a_misfit_names_the_block(own: list[nn.Module], head: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TreeNetwork.from_blocks(None, own, head, example=X)


def test_a_wrong_auxiliary_block_is_named() -> None:
    with pytest.raises(UserError, match=r"auxiliary block .*: gives shape"):
        network(auxiliary=lambda l, r: nn.Linear(5, 6))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"head": None}, "^head: must be a torch.nn.Module, not NoneType"),
        ({"blocks": [torch.tanh, nn.Identity()]}, "^block 1: must be a torch.nn.Module, not tanh"),
        ({"example": [[0.0] * 5]}, "^example: must be a small batch of inputs, a tensor, not list"),
        ({"split": "middle"}, "^split=middle: one of floor, right_full"),
        ({"family": "poisson"}, "^family=poisson: one of gaussian, bernoulli"),
        ({"family": "bernoulli"}, "^block 1: family=bernoulli has states between 0 and 1, .*sigm"),
        ({"auxiliary": nn.Linear(5, 5)}, "^auxiliary: must be a function of l and r"),
        ({"auxiliary": lambda l, r: None}, r"^auxiliary\(0, 2\): must give a torch.nn.Module, not"),
        ({"auxiliary": lambda l, r: 1 / 0}, r"^auxiliary\(0, 2\): ZeroDivisionError.*test_network"),
    ],
)
def test_what_is_no_network_is_one_line(words: dict[str, Any], says: str) -> None:
    given = {"blocks": blocks(), "head": nn.Linear(5, 3), "example": X, **words}
    with pytest.raises(UserError, match=says) as caught:
        TreeNetwork.from_blocks(None, **given)
    assert "\n" not in str(caught.value)


def test_path_shares_weights_with_the_tree() -> None:
    tree = TreeNetwork.from_blocks(None, blocks(7), nn.Linear(5, 3), example=X)
    path = tree.path([0, 4, 6, 7, 8])
    assert path[1] is tree.block((0, 4)) and path[-1] is tree.block((7, 8))


def test_fit_learns_and_refuses_unknown_settings() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 5)
    y = (x[:, 0] > 0).long()
    tree = TreeNetwork.from_blocks(None, blocks(3), nn.Linear(5, 2), example=x[:2])
    fit(tree, x, y, epochs=12, lr=1e-2, objective="node_all_ce", sigma=0.01)
    assert (tree(x).argmax(1) == y).float().mean() > 0.9
    with pytest.raises(UserError, match="unknown key learning_rate"):
        fit(tree, x, y, learning_rate=1)
    with pytest.raises(UserError, match=r"alpha=2\.0: must be at most 1"):
        fit(tree, x, y, alpha=2.0)


@pytest.mark.parametrize(
    ("words", "largest"),
    [(["init=torch"], 1 / 8), (["init=xavier"], 1 / 4), (["init=xavier", "model.gain=4"], 1)],
)
def test_initial_weights_of_the_perceptron(words: list[str], largest: float) -> None:
    """64 inputs, 32 outputs: uniform weights up to the bound of the rule, Glorot's without bias."""
    model = config.load([f"model.{words[0]}", *words[1:], "model.hidden=32"]).model
    weight, bias = mlp.blueprint(model, (8, 8), 10, "gaussian").block(0, 1).parameters()
    assert 0.98 * largest < weight.abs().max() <= largest
    assert (bias == 0).all() == (model.init == "xavier")
