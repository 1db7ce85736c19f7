"""Samples of several tensors: every kind of source, both engines, commands; what cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_columns
import pytest
import ray.data
import torch
from conftest import Result
from own_columns import IDS, NAMED, ONE, SHARE, One, Rows, Stream, Y, hub, net
from ray import cloudpickle
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from warm import warm_ray

from treeprop_ray import TreeNetwork, fit
from treeprop_ray.config import Settings
from treeprop_ray.data.own import own_set
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.inference.early_exit import EarlyExit
from treeprop_ray.methods import job_over
from treeprop_ray.methods.weighing import anatomy_of_job, weigh_all
from treeprop_ray.run import checkpoint

for module in (own_columns, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)

WORDS: dict[str, Any] = {
    "batch": 8, "steps": 7, "microbatches": 2, "sigma": 0.01, "mc_samples": 2, "beta": 0.2,
}  # fmt: skip
COLUMNS = {"columns": "ids,share,label"}
RAY = {"engine": "ray", "placement": "packed", "hosts": 2, "cpus_per_actor": 0.25}
Command = Callable[..., Result]


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def ray_rows() -> Any:
    return ray.data.from_items(
        [{"ids": a.numpy(), "share": b.numpy(), "label": int(y)}
         for a, b, y in zip(IDS, SHARE, Y, strict=True)]
    )  # fmt: skip


BY_NUMBER: dict[str, tuple[Any, dict[str, Any]]] = {
    "dict": (lambda: (NAMED, Y), {}),
    "other order": (lambda: ({"share": SHARE, "ids": IDS}, Y), {}),
    "tuple": (lambda: ((IDS, SHARE), Y), {}),
    "flat": (lambda: ((IDS, SHARE, Y),), {}),
    "numpy": (lambda: ((IDS.numpy(), SHARE.numpy()), Y.numpy()), {}),
    "tensor-dataset": (lambda: (TensorDataset(IDS, SHARE, Y),), {}),
    "rows": (lambda: (Rows("dict"),), COLUMNS),
    "nested-rows": (lambda: (Rows("nested"),), {}),
    "flat-rows": (lambda: (Rows("flat"),), {}),
    "hugging-face": (lambda: (hub(),), COLUMNS),
}
IN_ORDER: dict[str, tuple[Any, dict[str, Any]]] = {
    "iterable": (lambda: (Stream(),), COLUMNS),
    "loader": (lambda: (DataLoader(Rows("dict"), 8),), COLUMNS),
    "nested-loader": (lambda: (DataLoader(Rows("nested"), 8),), {}),
    "flat-loader": (lambda: (DataLoader(Rows("flat"), 8),), {}),
    "hugging-face-stream": (lambda: (hub().to_iterable_dataset(),), COLUMNS),
    "ray-data": (lambda: (ray_rows(),), COLUMNS),
}


def trained(data: tuple[Any, ...], **words: Any) -> dict[str, Tensor]:
    return fit(net(ONE[:2]), *data, **{**WORDS, **words}).network.state_dict()


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_several_inputs_train_as_one_tensor_of_them() -> None:
    """Whatever they come from; expected is a network whose stem takes one tensor apart itself."""
    for kinds, one in ((BY_NUMBER, (ONE, Y)), (IN_ORDER, (One(),))):
        expected = trained(one)
        for kind, (make, words) in kinds.items():
            mine = trained(make(), **words)
            assert all(torch.equal(mine[key], expected[key]) for key in expected), kind


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("rows", {}),
        ("dict", {"replicas": 2, "microbatches": 1}),
        ("loader", {"transport": "stream"}),
        ("ray-data", {}),
        ("hugging-face-stream", {"method": "bp"}),
    ],
)
def test_both_engines_give_the_same_weights(kind: str, more: dict[str, Any]) -> None:
    make, words = {**BY_NUMBER, **IN_ORDER}[kind]
    words = {**words, "method": more.get("method", "tree")}
    if words["method"] == "bp":
        words.update(sigma=0, mc_samples=1, beta=0)
    held = Rows() if "columns" in words else (NAMED, Y)
    expected = trained(make(), validation=held, **words)
    assert_same(trained(make(), validation=held, **{**words, **RAY, **more}), expected)


def test_commands_take_several_columns_from_train_to_export(
    command: Command, tmp_path: Path
) -> None:
    words = [
        "experiment=digits", "family=gaussian", "batch=16", "epochs=2", "lr=0.01",
        "data.name=own_columns:samples", "data.columns=ids,share,label", "data.classes=2",
        "model.name=own_columns:network", f"out={tmp_path}", "timeline_steps=0",
    ]  # fmt: skip
    there = [f"{key}={value}" for key, value in RAY.items()]
    probed = ["probe.every=3", "probe.batches=1"]
    assert command("train", *words, "name=b", *there).code == 0
    done = command("train", *words, "name=a", *probed)
    assert done.code == 0, done.err
    points = [checkpoint.newest(tmp_path / name / "checkpoints") for name in "ab"]
    assert points[0] and points[1]
    assert_same(dict(points[0].weights), dict(points[1].weights))

    run = f"run={tmp_path / 'a'}"
    for more in (["split=test"], ["mode=adaptive", "blocks=2"]):
        told = command("evaluate", run, *more)
        assert told.code == 0, told.err
    assert command("probe", run, "batches=1", "draws=2").code == 0
    assert command("export", run).code == 0
    program = torch.export.load(tmp_path / "a" / "export" / "full" / "model.pt2").module()
    network = net({name: tensor[:2] for name, tensor in NAMED.items()}).eval()
    weights = dict(points[0].weights)
    state = {
        (key if key.startswith("stem") else f"edges/{key}").replace("/", "."): value
        for key, value in weights.items()
    }
    network.load_state_dict(state)
    with torch.no_grad():
        assert torch.allclose(program(NAMED), network(NAMED), atol=1e-6)
    adaptive = command("export", run, "path=adaptive")
    assert adaptive.code == 0, adaptive.err
    answer = EarlyExit.load(tmp_path / "a" / "export" / "adaptive")(NAMED)
    assert answer.labels.shape == Y.shape


@pytest.mark.parametrize(
    "words", [{"recompute": True}, {"compile": True, "compile_backend": "aot_eager"}]
)
def test_options_of_the_blocks_change_no_bit(words: dict[str, Any]) -> None:
    assert_same(trained((NAMED, Y), **words), trained((NAMED, Y)))


def test_floats_among_them_become_those_of_the_network() -> None:
    class Wide(torch.nn.Module):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            assert [t.dtype for t in batch] == [torch.int64, torch.float64]
            return batch[0] * batch[1]

    blocks = [torch.nn.Linear(5, 5).double() for _ in range(2)]
    example = (IDS[:2], SHARE[:2].double())
    network = TreeNetwork.from_blocks(
        Wide(), blocks, torch.nn.Linear(5, 2).double(), example=example
    )
    fit(network, (IDS, SHARE), Y, precision="float64", steps=2, batch=8)
    samples = replace(own_set({"train": ((IDS, SHARE), Y)}, None, 8), dtype=torch.float64)
    work = anatomy_of_job(job_over(network, Settings(), samples, 2))  # placement=auto weighs it
    assert weigh_all(work)[0]


def uneven(i: int) -> dict[str, Any]:
    row = Rows()[i]
    return {**row, "share": SHARE[i, :4]} if i == 30 else row


class Uneven(Rows):
    def __getitem__(self, i: int) -> Any:
        return uneven(i)


class Lacks(Rows):
    def __getitem__(self, i: int) -> Any:
        return ({"ids": IDS[i]} if i == 30 else {"ids": IDS[i], "share": SHARE[i]}), Y[i]


LESS = {"ids": IDS, "share": SHARE[:, :4]}


@pytest.mark.parametrize(
    ("data", "words", "says"),
    [
        ((Rows(),), {"columns": "ids,weight,label"}, "columns: train has no column weight; it has"),
        ((Rows(),), {}, "train: say which columns are inputs and labels"),
        ((Rows(),), {"columns": "ids,ids,label"}, "columns=ids,ids,label: two names"),
        (({**NAMED, "share": SHARE[:9]}, Y), {}, "train share has 9 samples, y has 48 labels"),
        ((NAMED, Y), {"validation": (LESS, Y)}, "validation: share has samples of shape (4,)"),
        ((NAMED, Y), {"validation": ({"ids": IDS}, Y)}, "validation: has the inputs ids, train"),
        ((NAMED, Y), {"validation": (IDS, Y)}, "validation: has one tensor in a sample"),
        ((IDS, Y), {"validation": (NAMED, Y)}, "validation: has the inputs ids, share, tra"),
        (({**NAMED, "share": SHARE / 0}, Y), {}, "train: share of sample 0 is"),
        (({**NAMED, "share": {}}, Y), {}, "train, share: dict is no number"),
        ((Uneven(),), COLUMNS, "share of one batch differ: shape (4,)"),
        ((DataLoader(Uneven(), 1),), {**COLUMNS, "batch": 1}, "batches differ: share has sampl"),
        ((Uneven(),), {**COLUMNS, "batch": 1}, "share has samples of shape (4,) torch.float32, o"),
        ((Lacks(),), {}, "samples differ: one has the inputs"),
        (([(1.0, 2)] * 5,), {}, "train: must give pairs (input, label), not list of 5"),
        (({"ids": IDS}, Y), {}, "KeyError: 'share' (own_columns.py, line"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_column(
    data: Any, words: dict[str, Any], says: str
) -> None:
    with pytest.raises((UserError, TrainingError)) as caught:
        trained(data, **{"epochs": 1, "steps": 48, "microbatches": 1, **words})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_input_that_the_network_was_made_for_must_be_there() -> None:
    network = net({name: tensor[:2] for name, tensor in NAMED.items()})
    for data, has in (({"ids": IDS}, "ids"), (ONE, "one tensor")):
        with pytest.raises(UserError, match=rf"^columns: the stem takes .*share too, .* {has}$"):
            fit(network, data, Y, **WORDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.name=mlp"], "model.name=mlp: takes one tensor, samples have ids, share"),
        (
            ["experiment=digits_gru", "model.name=gru"],
            "model.name=gru: reads one sequence, samples have ids",
        ),
        (["data.augment=crop_flip"], "data.augment=crop_flip: is for images, samples have ids"),
    ],
)
def test_what_takes_one_tensor_says_so(
    words: list[str], says: str, command: Command, tmp_path: Path
) -> None:
    own = [
        "batch=16",
        "data.name=own_columns:samples",
        "data.columns=ids,share,label",
        "data.classes=2",
    ]
    kind = ["model.name=own_columns:network", "family=gaussian", f"out={tmp_path}"]
    done = command("train", *own, *kind, *words)
    assert done.code == 2 and says in done.err, done.err
    assert len(done.error_lines) == 1
