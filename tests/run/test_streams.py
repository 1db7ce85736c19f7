"""Runs over own data: stopped and taken up, and the train command with a factory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import Result, StopAt, Stopped, tiny_network
from own_data import WORDS, MapStyle, Noisy, Plain, Stateful, rows
from torch.utils.data import DataLoader

from treeprop_ray import Callback, fit
from treeprop_ray.run import checkpoint

Command = Callable[..., Result]


def train(data: Any, out: Path, name: str, *callbacks: Callback, **words: Any) -> Any:
    words = {**WORDS, "checkpoint_every": 5, "log_every": 1, **words}
    network = tiny_network(4).float()
    fit(network, data, name=name, out=str(out), callbacks=callbacks, **words)
    return network.state_dict()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Noisy, {}),
        (rows, {"columns": "img,label"}),
        (Stateful, {}),
        (lambda: rows().to_iterable_dataset(num_shards=2), {"columns": "img,label"}),
    ],
    ids=["map-style", "hugging-face", "stateful", "hugging-face-stream"],
)
def test_a_stopped_run_goes_on_with_the_samples_that_come_next(
    tmp_path: Path, make: Any, words: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(make(), tmp_path, "whole", **words)
    with pytest.raises(Stopped):
        train(make(), tmp_path, "cut", StopAt(8), **words)
    cut = train(make(), tmp_path, "cut", **words)
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    told = capsys.readouterr().out
    assert "continuing from" in told and "starts it anew" not in told
    shares = pd.read_csv(tmp_path / "whole" / "metrics.csv")["data_share"].dropna()
    assert ((shares >= 0) & (shares < 1)).all() and len(shares)


def test_a_stream_without_a_state_says_so_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped):
        train(Plain(), tmp_path, "cut", StopAt(8))
    assert "a resumed run starts it anew" in capsys.readouterr().out
    train(Plain(), tmp_path, "cut")
    assert checkpoint.newest(tmp_path / "cut" / "checkpoints").meta["step"] == 12


def test_the_probe_measures_on_held_out_samples_of_any_kind(tmp_path: Path) -> None:
    words = {"probe": {"every": 6, "batches": 2, "draws": 2}}
    for name, held in (("tensors", (MapStyle().x, MapStyle().y)), ("rows", MapStyle()),
                       ("loader", DataLoader(MapStyle(), 9))):  # fmt: skip
        train(MapStyle(), tmp_path, name, validation=held, **words)
    tables = [pd.read_csv(tmp_path / n / "probe.csv") for n in ("tensors", "rows", "loader")]
    assert len(tables[0])
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0])


FACTORY = """
import torch
from torch.utils.data import Dataset, DataLoader, IterableDataset
import datasets

X = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(120) % 3

class Rows(Dataset):
    def __init__(self, start, stop):
        self.start, self.stop = start, stop
    def __len__(self):
        return self.stop - self.start
    def __getitem__(self, i):
        return X[self.start + i], Y[self.start + i]

class Stream(IterableDataset):
    def __iter__(self):
        return zip(X, Y)

def arrays(data):
    return X.numpy(), Y.numpy()

def rows(data):
    return Rows(0, 120)

def splits(data):
    return {"train": Rows(0, 80), "validation": Rows(80, 100), "test": Rows(100, 120)}

def stream(data):
    return {"train": Stream(), "test": Rows(100, 120)}

def loader(data):
    return DataLoader(Rows(0, 120), batch_size=16, shuffle=True)

def named(data):
    named = datasets.Dataset.from_dict({"a": X.tolist(), "b": Y.tolist()})
    return datasets.DatasetDict({"train": named, "test": named})
"""
MLP = ["experiment=digits", "model.blocks=3", "model.hidden=8", "batch=16", "log_every=2",
       "checkpoint_every=4"]  # fmt: skip


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_data_factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "data.name=own_data_factory:"


def test_a_factory_may_give_samples_of_any_kind(
    command: Command, factory: str, tmp_path: Path
) -> None:
    words = [*MLP, "steps=8", f"out={tmp_path}"]
    for kind, more, sizes in [
        ("arrays", [], (108, 12, 0)),
        ("rows", ["data.classes=3"], (108, 12, 0)),
        ("splits", ["data.classes=3"], (80, 20, 20)),
        ("stream", ["data.classes=3"], (0, 0, 20)),
        ("loader", ["data.classes=3"], (112, 0, 0)),
        ("named", ["data.classes=3", "data.columns=a,b"], (108, 12, 120)),
    ]:
        result = command("train", *words, f"{factory}{kind}", f"name={kind}", *more)
        assert result.code == 0, (kind, result.err)
        summary = json.loads((tmp_path / kind / "summary.json").read_text())
        assert tuple(summary["samples"].values()) == sizes, kind
    a, b = (checkpoint.newest(tmp_path / k / "checkpoints") for k in ("arrays", "rows"))
    assert all(torch.equal(a.weights[key], b.weights[key]) for key in a.weights)
    again = command("evaluate", f"run={tmp_path / 'splits'}", "split=test")
    assert again.code == 0, again.err
    none = command("evaluate", f"run={tmp_path / 'loader'}", "split=test")
    assert none.code == 2 and "has no test samples" in none.err and len(none.error_lines) == 1
    assert command("export", f"run={tmp_path / 'loader'}").code == 0
    assert command("probe", f"run={tmp_path / 'rows'}", "batches=1", "draws=1").code == 0


@pytest.mark.parametrize(
    ("kind", "words", "line"),
    [
        ("rows", [], "data.classes=0: model.name=mlp must know how many classes"),
        ("stream", ["data.classes=3", "steps=0"], "is a stream of unknown length; say how many"),
        ("stream", ["data.classes=3", "data.limit=5"], "data.limit=5: "),
        ("loader", ["data.classes=3", "batch=8"], "batch=8: train is a DataLoader"),
        ("named", ["data.classes=3"], "say which columns"),
        ("named", ["data.classes=3", "data.columns=a"], "data.columns=a: two names"),
        ("rows", ["data.classes=2"], "label 2 is outside the classes 0 … 1"),
        ("rows", ["data.name=digits", "data.classes=2"], "data.classes=2: is for own data"),
    ],
)
def test_a_mistake_in_the_settings_is_one_line(
    command: Command, factory: str, tmp_path: Path, kind: str, words: list[str], line: str
) -> None:
    given = [f"{factory}{kind}", "steps=4", *words]
    result = command("train", *MLP, f"out={tmp_path}", *given)
    assert result.code == 2 and line in result.err and len(result.error_lines) == 1, result.err
