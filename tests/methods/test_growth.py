"""finish_from=path: the chain begins its last steps as the tree's deepest path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import StopAt, Stopped, engine_of
from torch import Tensor, nn

from treeprop_ray import TreeNetwork, config, data, fit, methods
from treeprop_ray.core.tree import Edge
from treeprop_ray.errors import UserError
from treeprop_ray.run.trainer import Trainer

GPT = ["experiment=text_small", "model.hidden=8", "model.heads=2", "data.length=8", "batch=6",
       "data.limit=64"]  # fmt: skip
GROWN = ["finish=0.5", "finish_from=path"]


def engine_for(words: list[str], total: int = 6) -> Any:
    settings = config.load(words)
    return engine_of(settings, data.load(settings), total)


def through(engine: Any, edges: list[Edge], z: Tensor) -> Tensor:
    for edge in edges:
        z = engine.host.through(edge, z)
    return z


@pytest.mark.parametrize(
    "words",
    [[], ["model.group=[2,2,3]", "model.auxiliary_layers=3"], ["model.blocks=12"]],
    ids=["single", "groups", "twelve"],
)
def test_the_chain_is_the_path_when_it_begins(words: list[str]) -> None:
    """With a learning rate of next to nothing what the first step leaves is what it began with."""
    engine = engine_for([*GPT, *words, *GROWN, "lr=1e-3"])
    tree = engine.tree
    for step in range(3):
        engine.step(step, report=False)
    z = torch.randn(2, 8, 8)
    path = tree.path_edges(tree.spine_paths[-1])[:-1]
    chain = tree.path_edges(tree.chain)[:-1]
    expected = through(engine, path, z)
    assert not torch.equal(through(engine, chain, z), expected)
    engine.host.optimizer.rule = type(engine.host.optimizer.rule)(lr=1e-12, total_steps=6)
    engine.step(3, report=False)
    torch.testing.assert_close(through(engine, chain, z), expected, rtol=1e-5, atol=1e-6)


def test_what_is_added_learns_and_its_optimizer_begins_anew() -> None:
    engine = engine_for([*GPT, *GROWN])
    for step in range(4):
        engine.step(step, report=False)
    weights, slots = engine.state()
    assert float(slots["1-2/contract.weight/step"]) == 1  # an update of its own
    assert float(slots["6-7/contract.weight/step"]) == 4  # on both paths from the start
    for step in (4, 5):
        engine.step(step, report=False)
    weights, _ = engine.state()
    assert weights["1-2/contract.weight"].abs().sum() > 0
    assert weights["1-2/expand.weight"].abs().sum() > 0


def test_a_layer_of_a_vision_transformer_can_add_nothing() -> None:
    from treeprop_ray.models.vit import Block

    block, z = Block(8, 2, 2.0, 0.0), torch.randn(2, 4, 8)
    assert not torch.equal(block(z), z)
    block.add_nothing()
    assert torch.equal(block(z), z)


@pytest.mark.parametrize("stop", [3, 5], ids=["at_the_switch", "after"])
def test_a_run_is_taken_up_across_the_switch(tmp_path: Path, stop: int) -> None:
    words = [*GPT, "finish=0.6", "finish_from=path", "steps=8", "checkpoint_every=1",
             "epochs=1", f"out={tmp_path}"]  # fmt: skip
    expected = Trainer.of(config.load([*words, "name=whole"]))
    expected.train()
    settings = config.load([*words, "name=parts"])
    with pytest.raises(Stopped):
        Trainer.of(settings, callbacks=[StopAt(stop)]).train()
    again = Trainer.of(settings)
    again.train()
    assert again.start > 0
    assert all(torch.equal(again.weights[k], v) for k, v in expected.weights.items())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 5)

    def forward(self, z: Tensor) -> Tensor:
        return z + torch.tanh(self.map(z))


class Willing(Residual):
    def add_nothing(self) -> None:
        nn.init.zeros_(self.map.weight)
        nn.init.zeros_(self.map.bias)


def test_own_blocks_say_how_they_add_nothing() -> None:
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    words: dict[str, Any] = {"batch": 32, "steps": 4, "finish": 0.5, "finish_from": "path"}
    made = [Willing() for _ in range(3)]
    network = TreeNetwork.from_blocks(None, made, nn.Linear(5, 2), example=x[:2])
    fit(network, x, y, **words)
    blocks = [m for m in network.chain().modules() if isinstance(m, Willing)]
    assert len(blocks) == 3 and not any(torch.equal(block(x), x) for block in blocks)
    network = TreeNetwork.from_blocks(
        None, [Residual() for _ in range(3)], nn.Linear(5, 2), example=x[:2]
    )
    with pytest.raises(UserError, match="finish_from=path: Residual has no method add_nothing"):
        fit(network, x, y, **words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*GPT], "finish_from=path: needs finish"),
        ([*GPT, "finish=0.5", "finish_path=spine-1"], "finish_from=path: needs finish"),
        ([*GPT, "finish=0.5", "finish_sweeps=2"], "needs finish_sweeps=0"),
        ([*GPT, "finish=0.5", "replicas=2", "engine=ray"], "needs replicas=1"),
        (["finish=0.5"], "not model.name=mlp"),
        ([*GPT, "method=bp"], "finish_from=path: is for method=tree"),
    ],
)
def test_what_cannot_grow_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        methods.checked(config.load([*words, "finish_from=path"]))
