"""Losses at the head: means over the labels of the whole batch that count, on both engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ray import cloudpickle
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from warm import warm_ray

import treeprop_ray
from treeprop_ray.core import loss
from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.core.rule import LossRule
from treeprop_ray.data.sources import check_labels
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.trainer import Trainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import the tests
SEED = torch.Generator().manual_seed(3)
X = torch.randn(64, 6, generator=SEED)
RAY = {"engine": "ray", "placement": "packed", "hosts": 2}


class Watch(Callback):
    """Keeps the summary of a run, and its losses."""

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        self.summary, self.loss, self.weights = summary, run.log.loss, run.weights


def network(outputs: int, tokens: bool = False, seed: int = 0) -> TreeNetwork:
    torch.manual_seed(seed)
    stem = nn.Embedding(9, 6) if tokens else nn.Linear(6, 6)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    example = torch.zeros(2, 5, dtype=torch.long) if tokens else X[:2]
    return TreeNetwork.from_blocks(stem, blocks, nn.Linear(6, outputs), example=example)


def task(name: str) -> tuple[TreeNetwork, Tensor, Tensor, dict[str, Any]]:
    """Regression, several labels, masked tokens, class weights, a function of one's own."""
    if name == "mse":
        return network(2), X, torch.stack([X.sum(1), X[:, 0]], 1), {"loss": "mse"}
    if name == "own":
        y = torch.stack([X.sum(1), X[:, 0]], 1)
        return network(2), X, y, {"loss": "own_losses:smooth_l1"}
    if name == "bce":
        return network(3), X, (X[:, :3] > 0).float(), {"loss": "bce"}
    if name == "weights":
        words = {"loss": {"class_weights": [1, 5, 0.5], "label_smoothing": 0.1}}
        return network(3), X, X[:, :3].argmax(1), words
    gen = torch.Generator().manual_seed(5)
    x = torch.randint(9, (64, 5), generator=gen)
    hidden = torch.rand(x.shape, generator=gen) < 0.8
    return network(9, tokens=True), x, x.masked_fill(hidden, -100), {}


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """One Ray for the file: to start it costs more than a run does."""
    with warm_ray():
        yield


TASKS = ["mse", "own", "bce", "weights", "masked"]


def trained(name: str, **settings: Any) -> Watch:
    net, x, y, words = task(name)
    watch = Watch()
    words = {"epochs": 2, "batch": 16, "lr": 0.01, "seed": 4, **words, **settings}
    treeprop_ray.fit(net, x, y, validation=(x, y), callbacks=[watch], **words)
    return watch


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "tree") for name in TASKS), ("own", "bp"), ("masked", "bp")],
)
def test_both_engines_give_the_same_weights(name: str, method: str, local_ray: None) -> None:
    more = {"tree": {"beta": 0.3, "microbatches": 3}, "bp": {"microbatches": 2}}[method]
    here, there = (trained(name, method=method, **more, **where) for where in ({}, RAY))
    assert here.weights.keys() == there.weights.keys()
    assert all(torch.equal(here.weights[k], there.weights[k]) for k in here.weights)
    assert here.summary["final"] == there.summary["final"]


@pytest.mark.parametrize("name", TASKS)
def test_pieces_of_a_batch_do_not_change_the_mean(name: str) -> None:
    for method in ("tree", "bp"):
        whole, cut = (trained(name, microbatches=m, method=method, optimizer="sgd") for m in (1, 5))
        for key, value in whole.weights.items():
            torch.testing.assert_close(cut.weights[key], value, rtol=1e-4, atol=1e-6)


def test_ignored_labels_are_counted_nowhere() -> None:
    net, x, y, _ = task("masked")
    watch = Watch()
    treeprop_ray.fit(
        net, x, y, validation=(x, y), callbacks=[watch], epochs=1, batch=64, lr=1e-9, method="bp"
    )
    with torch.no_grad():
        logits = net(x)
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten())  # torch's mean leaves -100 out
    assert watch.loss == pytest.approx(float(expected), rel=1e-4)
    full = watch.summary["final"]["validation"]["full"]
    keep = y != -100
    assert full["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert full["accuracy"] == float((logits.argmax(-1) == y)[keep].double().mean())


def test_a_batch_without_a_label_that_counts_has_no_loss() -> None:
    net, x, y, _ = task("masked")
    for method in ("tree", "bp"):
        watch, words = Watch(), {"method": method, "objective": "final_ce", "epochs": 1}
        treeprop_ray.fit(net, x, torch.full_like(y, -100), callbacks=[watch], batch=32, **words)
        assert watch.loss == 0


def test_losses_are_those_of_torch() -> None:
    logits, labels = torch.randn(8, 3), torch.tensor([0, 1, 2, -100, 1, 1, 0, 2])
    rule = LossRule(label_smoothing=0.2, class_weights=(1.0, 2.0, 0.5))
    mean = loss.total(rule, logits, labels) / loss.counted(rule, labels)
    expected = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.2)
    torch.testing.assert_close(mean, expected(logits, labels))
    targets = torch.rand(8, 3)
    for name, theirs in (("mse", nn.MSELoss()), ("bce", nn.BCEWithLogitsLoss())):
        rule = LossRule(name)
        mean = loss.total(rule, logits, targets) / loss.counted(rule, targets)
        torch.testing.assert_close(mean, theirs(logits, targets))
        each = loss.per_sample(rule, logits, targets)
        torch.testing.assert_close(each.sum(), loss.total(rule, logits, targets))


def test_labels_may_have_an_axis_of_their_own() -> None:
    logits, labels = torch.randn(8, 3), torch.tensor([0, 1, 2, -100, 1, 1, 0, 2])
    rule = LossRule()
    for kind in (loss.correct, loss.total):
        assert kind(rule, logits, labels[:, None]) == kind(rule, logits, labels)


def test_classes_stand_in_the_last_axis() -> None:
    maps, labels = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    expected = F.cross_entropy(maps, labels, reduction="sum")
    torch.testing.assert_close(loss.total(LossRule(), maps.movedim(1, -1), labels), expected)
    with pytest.raises(UserError, match=r"gives shape \(2, 3, 4, 5\) for labels .*movedim"):
        loss.total(LossRule(), maps, labels)


def test_labels_are_checked_for_what_their_loss_takes() -> None:
    y = torch.tensor([0, 2, -1, 1])
    check_labels(y, 3, "train", LossRule(ignore_index=-1), whole=True)
    check_labels(y - 7, 3, "train", LossRule("mse"))
    check_labels(torch.tensor([[0.3, 1], [-100, 0]]), 2, "train", LossRule("bce"))
    for labels, rule, says in (
        (y, LossRule(), r"train: label -1 is outside the classes 0 … 2 \(row 2\)"),
        (y, LossRule("bce", ignore_index=-1), r"train: label 2 is outside 0 … 1 \(row 1\)"),
        (y - 0.5, LossRule("bce"), r"train: label -0.5 is outside 0 … 1 \(row 0\)"),
    ):
        with pytest.raises(UserError, match=says):
            check_labels(labels, 3, "train", rule, whole=True)
    words = {"epochs": 1, "batch": 64, "loss": {"ignore_index": 9, "class_weights": [1, 2, 3]}}
    y = torch.arange(64) % 3
    treeprop_ray.fit(network(3), X, torch.where(X[:, 0] > 0, 9, y), **words)  # three classes
    treeprop_ray.fit(network(3), X, y % 2, **words)  # of which one is not there
    rows = list(zip(X, y, strict=True))
    treeprop_ray.fit(network(3), DataLoader(rows, 64), **words)
    with pytest.raises(UserError, match=r"label 3 is outside the classes 0 … 2"):
        treeprop_ray.fit(network(4), X, torch.arange(64) % 4, **words)


def test_without_right_and_wrong_the_loss_is_the_score() -> None:
    summary = trained("mse").summary
    figures = summary["final"]["validation"]["full"]
    assert figures.keys() == {"loss"} and "lower is better" in summary["table"]
    assert summary["best_validation"]["loss"] == pytest.approx(figures["loss"])
    assert "accuracy" in trained("bce").summary["final"]["validation"]["full"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({}, "loss.name=cross_entropy: labels must be whole numbers"),
        ({"loss": "mae"}, "loss.name=mae: one of cross_entropy, mse, bce, or package.module"),
        ({"loss": {"name": "mse", "label_smoothing": 0.1}}, "loss.label_smoothing=0.1: is for"),
        ({"loss": {"name": "mse", "class_weights": [1]}}, "loss.class_weights=.1.0.: is for"),
        ({"loss": "no.such:thing"}, "loss.name=no.such:thing: cannot be imported"),
        ({"loss": 3}, "loss=3: is a group of settings"),
        ({"loss": "mse", "method": "cff"}, "loss.name=mse: method=cff compares"),
    ],
)
def test_wrong_words_are_one_line(words: dict[str, Any], says: str) -> None:
    net, x, y, _ = task("mse")
    with pytest.raises(UserError, match=says) as caught:
        treeprop_ray.fit(net, x, y, epochs=1, batch=16, **words)
    assert "\n" not in str(caught.value)


def test_a_loss_of_every_output_with_every_target_is_one_line() -> None:
    """Outputs (n, 1) less targets (n,) is a table (n, n)."""
    words = {"loss": "own_losses:square", "epochs": 1, "batch": 16}
    with pytest.raises(UserError, match=r"gives shape \(16, 16\) of outputs of shape \(16, 1\)"):
        treeprop_ray.fit(network(1), X, X.sum(1), **words)
    treeprop_ray.fit(network(1), X, X.sum(1, keepdim=True), **words)


def mean_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


class Largest:
    """As torchmetrics' objects are: batch after batch."""

    def reset(self) -> None:
        self.value = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.value = max(self.value, float((outputs - targets).abs().max()))

    def compute(self) -> Tensor:
        return torch.tensor(self.value)


def test_metrics_of_ones_own_are_scored_beside_the_loss(local_ray: None) -> None:
    weights = []
    for more in ({}, RAY):
        net, x, y, words = task("mse")
        watch, metrics = Watch(), {"mae": mean_error, "largest": Largest()}
        treeprop_ray.fit(
            net, x, y, validation=(x, y), callbacks=[watch], metrics=metrics, epochs=1, batch=16,
            **words, **more,
        )  # fmt: skip
        with torch.no_grad():
            error = (net(x) - y).abs()
        full = watch.summary["final"]["validation"]["full"]
        assert full["mae"] == pytest.approx(float(error.mean()), rel=1e-5)
        assert full["largest"] == pytest.approx(float(error.max()), rel=1e-5)
        assert watch.summary["final"]["validation"]["spine-1"].keys() == full.keys()
        weights.append(watch.weights)
    assert all(torch.equal(weights[0][key], value) for key, value in weights[1].items())


def test_metrics_that_cannot_be_are_one_line() -> None:
    net, x, y, words = task("mse")
    for name, metric, says in (
        ("loss", mean_error, "^metrics=loss: is scored anyway"),
        ("each", lambda outputs, _: outputs, "^metrics=each: .*one element"),
        ("bad", lambda outputs, _: 1 / 0, r"^metrics=bad: ZeroDivisionError: .*test_loss.py, line"),
    ):
        more = {"metrics": {name: metric}, "validation": (x, y), "epochs": 1, "batch": 64}
        with pytest.raises((UserError, TrainingError), match=says) as caught:
            treeprop_ray.fit(net, x, y, **more, **words)
        assert "\n" not in str(caught.value)


def test_metrics_of_torchmetrics_are_taken(local_ray: None) -> None:
    import treeprop_ray.core.vision  # torchmetrics imports torchvision

    torchmetrics = pytest.importorskip("torchmetrics")
    results = []
    for more in ({}, RAY):
        net, x, y, words = task("mse")
        metrics = {"mae": torchmetrics.MeanAbsoluteError(), "r2": torchmetrics.R2Score()}
        results.append(
            treeprop_ray.fit(
                net, x, y, validation=(x, y), metrics=metrics, epochs=1, batch=16, **words, **more
            )
        )
    one, many = results
    scores = one.scores["validation"]
    assert scores == many.scores["validation"]
    state = many.network.state_dict()
    assert all(torch.equal(state[key], value) for key, value in one.network.state_dict().items())
    with torch.no_grad():
        out = net(x)
        mean = torchmetrics.functional.mean_absolute_error(out, y)
        r2 = torchmetrics.functional.r2_score(out, y)
    assert scores["full"]["mae"] == pytest.approx(float(mean), rel=1e-5)
    assert scores["full"]["r2"] == pytest.approx(float(r2), rel=1e-4)
    assert scores["spine-1"]["mae"] != scores["full"]["mae"]  # reset between paths
