"""Networks that a factory of one's own gives: the same commands as for recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import own_tasks
import pytest
import torch
from conftest import Result
from torch import Tensor, nn
from warm import warm_ray

import treeprop_ray.core.vision  # noqa: F401  (before transformers, which imports torchvision)
from treeprop_ray import TreeNetwork, config
from treeprop_ray.core.recipe import recipe_of
from treeprop_ray.errors import UserError
from treeprop_ray.models import of_network
from treeprop_ray.run import checkpoint, reading

import transformers as hf  # isort: skip

SMALL = ["experiment=digits", "family=gaussian", "batch=16", "steps=2", "loggers=[]"]
OWN = ["data.name=own_tasks:masked", "model.name=own_tasks:hub"]


class Pair(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return input + super().forward(input).tanh(), input


def conv(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv1d(a, b, 3, padding=1), nn.BatchNorm1d(b))


def networks() -> dict[str, TreeNetwork]:
    torch.manual_seed(3)
    x = torch.randn(2, 6)
    pairs = [Pair(6, 6) for _ in range(5)]
    exits = TreeNetwork.from_blocks(
        None, [conv(2, 2), conv(2, 3), conv(3, 4)],
        nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), example=torch.randn(2, 2, 6),
        auxiliary=lambda l, r: conv(2, 3), exits={2: nn.Conv1d(3, 4, 1)},
    )  # fmt: skip
    return {
        "tuples": TreeNetwork.from_blocks(nn.Linear(6, 6), pairs, nn.Linear(6, 3), example=x),
        "groups": TreeNetwork.from_blocks(
            None, [nn.Linear(6, 6) for _ in range(5)], nn.Linear(6, 3), example=x,
            group=2, auxiliary_layers=2, split="right_full",
        ),
        "exits": exits,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["tuples", "groups", "exits"])
def test_its_recipe_makes_the_same_network(kind: str) -> None:
    network = networks()[kind].eval()
    recipe = recipe_of(network)
    tree = recipe.tree(network.tree.split)
    again = TreeNetwork.from_blueprint(recipe, tree, seed=9).eval()
    assert again.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(again.state_dict()[k], v) for k, v in network.state_dict().items())
    x = torch.randn(4, 2, 6) if kind == "exits" else torch.randn(4, 6)
    for path in network.tree.named_paths.values():
        assert torch.equal(again.path(path)(x), network.path(path)(x))
    own = {id(p) for p in network.parameters()}
    assert not own & {id(p) for p in again.parameters()}
    assert recipe.count_parameters("0-1") > 0


def test_settings_that_are_the_networks_own_are_refused() -> None:
    name = "model.name=own_tasks:hub"
    for words, says in (
        (["split=right_full"], r"^split=right_full: the network of model.name=.* has floor"),
        (["model.group=2"], r"^model.group: model.name=own_tasks:hub gives a network"),
    ):
        with pytest.raises(UserError, match=says):
            of_network(config.load([name, *words]), networks()["tuples"])


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def weights(run: Path) -> dict[str, Tensor]:
    point = checkpoint.newest(run / "checkpoints")
    assert point is not None
    return point.weights


def test_a_model_of_hugging_face_is_trained_evaluated_probed_and_exported_by_commands(
    command: Callable[..., Result], tmp_path: Path, local_ray: None
) -> None:
    """Two actors that make their own parts end with the weights of one process."""
    words = [*SMALL, *OWN, f"out={tmp_path}"]
    where = ["engine=ray", "placement=packed", "hosts=2"]
    for name, more in (("one", []), ("two", where)):
        done = command("train", *words, f"name={name}", *more)
        assert done.code == 0, done.err
    found, expected = (weights(tmp_path / name) for name in ("two", "one"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())

    told = [command("evaluate", f"run={tmp_path / name}") for name in ("one", "two")]
    tables = [done.out.partition("\n")[2] for done in told]  # without the checkpoint's path
    assert told[1].code == 0 and tables[0] == tables[1] and "spine-2" in tables[0], told[1].err
    rows = []
    for name, engine in (("one", "local"), ("two", "ray")):
        run = f"run={tmp_path / name}"
        assert command("probe", run, "batches=1", "draws=1", f"engine={engine}").code == 0
        rows.append((tmp_path / name / "probe.csv").read_text())
    assert rows[0] == rows[1]
    done = command("export", f"run={tmp_path / 'two'}", "path=spine-2", "format=hf")
    assert done.code == 0, done.err
    folder = tmp_path / "two" / "export" / "spine-2-hf"
    model = hf.GPT2LMHeadModel.from_pretrained(folder).eval()
    _, _, _, network = reading.open_run(str(tmp_path / "two"), "last", None)
    path = network.path(network.tree.named_paths["spine-2"])
    with torch.no_grad():
        assert torch.equal(model(own_tasks.TOKENS).logits, path(own_tasks.TOKENS))
    done = command("train", *words, "method=bp", "engine=ray", "hosts=2", "name=three")
    assert done.code == 2 and "the head uses the stem's weights" in done.err
