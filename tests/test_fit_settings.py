"""No setting of `fit` is passed over in silence: each one is taken, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from treeprop_ray import TreeNetwork, config, fit
from treeprop_ray.config import Settings
from treeprop_ray.errors import UserError

KEYS = [key for key, _, _ in config.walk(Settings())]
# Refused by fit: the network and the data say it, or it belongs to the train command.
REFUSED = {"experiment", "model", "data", "time", "split", "family", "cff"}
ACTORS = {"head_copies", "shard_optimizer", "reduce"}  # refused without actors, or copies of them
FOLDER = {
    "fresh", "storage", "checkpoint_every", "keep_last", "keep_best", "probe",
    "timeline_steps", "loggers",
}  # fmt: skip
OTHER: dict[str, Any] = {  # another value than the default, where +1 or the next choice will not do
    "name": "r", "out": "", "experiment": "mine", "batch": 16, "data.root": "x",
    "storage": "", "method": "bp", "engine": "local", "epochs": 1,
    "beta": 0.25, "alpha": 0.5, "momentum": 0.5, "warmup": 0.5, "mc_samples": 2, "device": "cpu",
    "wandb": "", "mlflow": "", "loggers": ["csv"], "precision": "bf16", "ray.address": "",
    "gpus_per_actor": 0.0, "patience": 1, "transport": "store", "recompute": False,
    "init_from": "", "freeze": ["head"], "betas": [0.9, 0.95],
    "model.group": [2], "finish_path": "spine-1", "coarsen": [0.5],
    "data.columns": "img,label", "loss.name": "cross_entropy", "loss.class_weights": [1.0, 2.0],
}  # fmt: skip


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.Tanh())

    def add_nothing(self) -> None:
        """As finish_from=path asks of a block; what it computes is of no interest here."""


def network() -> TreeNetwork:
    torch.manual_seed(0)
    own = [Block() for _ in range(3)]
    return TreeNetwork.from_blocks(None, own, nn.Linear(5, 2), example=torch.zeros(2, 5))


def other(key: str, value: Any, rule: Any) -> Any:
    """A legal value that is not the default."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    if "choices" in rule:
        return next(c for c in rule["choices"] if c != value)
    return value + 1 if isinstance(value, int) else value * 0.5 + 0.01


@pytest.mark.parametrize("key", KEYS)
def test_each_setting_is_taken_or_refused(key: str, tmp_path: Path) -> None:
    if key in ("metrics", "callbacks"):  # of which fit takes objects
        with pytest.raises(UserError, match=f"^{key}: "):
            fit(network(), *torch.ones(2, 64, 5), **{key: ["package.module:name"]})
        return
    leaf = next((f, v) for k, f, v in config.walk(Settings()) if k == key)
    value, root = other(key, leaf[1], leaf[0].metadata), key.partition(".")[0]
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    words: dict[str, Any] = {"batch": 32, "steps": 1}
    words[root] = {key.partition(".")[2]: value} if "." in key else value
    if root == "data":  # as a keyword it is the samples
        words = {"batch": 32, "steps": 1, key: value}
    if key == "compile_backend":
        words["compile"] = True
    if key in ("mc_samples", "reduction"):
        words["sigma"] = 0.1
    if key in ("finish_path", "finish_from", "finish_sweeps"):
        words["finish"] = 0.5
    if key == "out":
        words["out"] = str(tmp_path)
    if root in REFUSED | ACTORS:
        with pytest.raises(UserError, match=f"^{root}"):
            fit(network(), x, y, **words)
        return
    if root in FOLDER:
        with pytest.raises(UserError, match="needs a run folder"):
            fit(network(), x, y, **words)
    if root in FOLDER or key == "name":
        words.update(name="r", out=str(tmp_path))
    result = fit(network(), x, y, validation=(x, y), test=(x, y), **words)
    if result.folder:
        stored = {k: v for k, _, v in config.walk(config.load_file(result.folder / "config.yaml"))}
        assert stored[key] == words[root] if "." not in key else value
    assert result.summary["steps"] >= 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"loss": torch.nn.functional.mse_loss}, 'loss=mse_loss: give its name, loss="package.mod'),
        ({"optimizer": torch.optim.SGD}, "optimizer=SGD: give its name"),
        ({"precision": "float64"}, r"precision=float64: .* weights are float32; network.double"),
        ({"callbacks": [print]}, "callbacks: builtin_function_or_method is no treeprop_ray.Callb"),
        ({"callbacks": print}, "callbacks: a list such as"),
        ({"metrics": [print]}, "metrics: a dict such as"),
        ({"network": nn.Linear(5, 2)}, "network: is a Linear; make a TreeNetwork"),
        ({"lr": object()}, "lr: a number, a word or a list, not object"),
    ],
)
def test_what_fit_cannot_take_is_one_line(words: dict[str, Any], says: str) -> None:
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    own = words.pop("network", network())
    with pytest.raises(UserError, match=says) as caught:
        fit(own, x, y, steps=1, **words)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    plain = {"lr": 0.25, "epochs": 1, "betas": [0.5, 0.75], "loss": {"class_weights": [1.0, 2.0]}}
    others = {
        "lr": np.float32(0.25), "epochs": np.int64(1), "betas": (0.5, 0.75),
        "loss": {"class_weights": torch.tensor([1.0, 2.0])},
    }  # fmt: skip
    a, b = (fit(network(), x, y, **words).network.state_dict() for words in (plain, others))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_fit_changes_nothing_but_the_weights() -> None:
    """Draws, threads, and whether dropout is on are the caller's."""
    own = network().eval()
    torch.manual_seed(5)
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.randn(64, 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fit(own, x, y, steps=1, threads=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.rand(3), expected)
    assert not any(module.training for module in own.modules())
