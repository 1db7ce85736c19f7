"""Starting from the weights of another run, and taking a run up with other settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_network
from warm import warm_ray

from treeprop_ray import fit
from treeprop_ray.run import checkpoint

WORDS = ["experiment=digits", "model.hidden=8", "batch=32", "timeline_steps=0"]
HERE = Path("checkpoints")
Weights = dict[str, torch.Tensor]
Command = Callable[..., Any]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


@pytest.fixture
def train(tmp_path: Path, command: Command) -> Iterator[Command]:
    """Run the train command in a folder of the test."""
    yield lambda name, *words: command("train", *WORDS, f"out={tmp_path}", f"name={name}", *words)


def weights(run: Path, step: int) -> Weights:
    return checkpoint.load(run / HERE, step).weights


def unmoved(run: Path, words: list[str], train: Command) -> Weights:
    """Weights after one step that changes nothing: what the run has started with."""
    done = train(run.name, "lr=1e-30", "weight_decay=0", "steps=1", *words)
    assert done.code == 0, done.err
    return weights(run, 1)


@pytest.mark.parametrize("kind", ["run", "checkpoint", "export"])
def test_a_run_starts_from_a_run_a_checkpoint_or_an_export(
    kind: str, tmp_path: Path, train: Command, command: Command
) -> None:
    train("a", "steps=4", "seed=3")
    place = {"run": tmp_path / "a", "checkpoint": tmp_path / "a" / HERE / checkpoint.name_of(4)}
    if kind == "export":
        place[kind] = tmp_path / "exported"
        command("export", f"run={tmp_path / 'a'}", "path=spine-1", f"to={place[kind]}")
    words = [f"init_from={place[kind]}", f"init_strict={str(kind != 'export').lower()}"]
    start = unmoved(tmp_path / "b", words, train)
    taken = {"0-4", "7-8"} if kind == "export" else {key.split("/")[0] for key in start}
    source = weights(tmp_path / "a", 4)
    for key, value in start.items():
        assert torch.equal(value, source[key]) == (key.split("/")[0] in taken), key
    record = json.loads((tmp_path / "b" / "summary.json").read_text())["initial"]
    assert set(record["parts"]) == taken
    assert set(record["fresh"]) == {key.split("/")[0] for key in start} - taken


@pytest.mark.parametrize("output_block", [False, True])
def test_a_language_model_starts_from_its_export_to_hugging_face(
    output_block: bool, tmp_path: Path, command: Command, local_ray: None
) -> None:
    pytest.importorskip("transformers")
    words = [
        "experiment=text_small", "data.limit=64", "data.length=16", "model.blocks=4", "batch=8",
        "model.hidden=12", "timeline_steps=0", f"out={tmp_path}", "init_strict=true",
        f"model.output_block={str(output_block).lower()}",
    ]  # fmt: skip
    assert command("train", *words, "name=a", "steps=2", "seed=3", "lr=0.01").code == 0
    assert command("export", f"run={tmp_path / 'a'}", "format=hf").code == 0
    folder = tmp_path / "a" / "export" / "full-hf"
    start = unmoved(tmp_path / "b", [f"init_from={folder}"], lambda name, *more: command(
        "train", *words, f"name={name}", *more))  # fmt: skip
    source = weights(tmp_path / "a", 2)
    middle = {"0-2": "0-1", "0-3": "1-2", "2-4": "2-3"}
    for key, value in start.items():
        part, _, tensor = key.partition("/")
        assert torch.equal(value, source[f"{middle.get(part, part)}/{tensor}"]), key
    assert command("train", *words, "name=c", f"init_from={folder}", "model.blocks=6").code == 2
    if output_block:
        return  # once with actors will do
    where = ["engine=ray", "placement=packed", "hosts=2"]
    for name, more in (("one", []), ("two", where)):
        done = command("train", *words, f"name={name}", "steps=3", f"init_from={folder}", *more)
        assert done.code == 0, done.err
    found, expected = weights(tmp_path / "two", 3), weights(tmp_path / "one", 3)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("kind", ["run", "export"])
def test_layers_are_found_in_other_blocks(
    kind: str, tmp_path: Path, train: Command, command: Command
) -> None:
    """From single layers to blocks of several and back: the chain, and auxiliary layers between the
    same states."""
    train("a", "steps=4", "seed=3")
    place = tmp_path / "a"
    if kind == "export":
        place = tmp_path / "exported"
        command("export", f"run={tmp_path / 'a'}", f"to={place}")
    source = weights(tmp_path / "a", 4)
    group = ["model.group=[2,2,3]"]
    start = unmoved(
        tmp_path / "b", [f"init_from={place}", f"init_strict={kind == 'run'}", *group], train
    )
    single = {"3-4/weight": "7-8/weight", "3-4/bias": "7-8/bias"}
    for key, value in start.items():
        layer = single.get(key, key.partition("/")[2].replace(".", "/", 1))
        assert torch.equal(value, source[layer]) == (kind == "run" or "0-4" not in layer), key
    back = unmoved(
        tmp_path / "c", [f"init_from={tmp_path / 'b'}", "init_strict=false", "seed=5"], train
    )
    chain = {f"{i}-{i + 1}" for i in range(8)} | {"0-4"}
    for key, value in back.items():
        if key not in source or key.partition("/")[0] not in chain:
            continue
        assert torch.equal(value, source[key]) == (kind == "run" or "0-4/" not in key), key


def test_parts_that_do_not_fit_are_named(tmp_path: Path, train: Command) -> None:
    train("chain", "steps=1", "method=bp")
    refused = train("tree", "steps=1", f"init_from={tmp_path / 'chain'}")
    assert refused.code == 2 and "part 0-4: is not there (and 3 more parts)" in refused.err
    wide = train("wide", "steps=1", f"init_from={tmp_path / 'chain'}", "model.hidden=9")
    assert wide.code == 2 and "weight has shape (10, 8) there, (10, 9) in this run" in wide.err
    for place in (tmp_path, tmp_path / "nowhere"):
        none = train("none", "steps=1", f"init_from={place}")
        assert none.code == 2 and "must be a run folder, a checkpoint" in none.err
    assert not (tmp_path / "none").exists()


def test_a_run_that_goes_on_does_not_need_its_source(tmp_path: Path, train: Command) -> None:
    """The same weights as a run that was not interrupted, though the source is gone."""
    train("a", "steps=2", "seed=3")
    words = [f"init_from={tmp_path / 'a'}", "checkpoint_every=2"]
    train("whole", "steps=4", *words)
    train("halves", "steps=2", *words)
    (tmp_path / "a").rename(tmp_path / "gone")
    assert train("halves", "steps=4", *words).code == 0
    one, two = weights(tmp_path / "whole", 4), weights(tmp_path / "halves", 4)
    assert all(torch.equal(two[key], value) for key, value in one.items())
    summary = json.loads((tmp_path / "halves" / "summary.json").read_text())
    assert len(summary["initial"]["parts"]) == 12


def test_fit_starts_from_a_run_of_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.randint(3, (32,))
    first = fit(tiny_network(5), x, y, epochs=2, batch=16, name="a", out=str(tmp_path))
    start = {"lr": 1e-30, "weight_decay": 0.0, "init_from": str(tmp_path / "a")}
    second = fit(tiny_network(5, seed=9), x, y, epochs=1, batch=16, **start)
    for key, value in first.network.state_dict().items():
        assert torch.equal(second.network.state_dict()[key], value), key


def test_another_learning_rate_only_if_the_user_says_so(tmp_path: Path, train: Command) -> None:
    words = ["lr=0.01", "checkpoint_every=2"]
    train("a", "steps=2", *words)
    train("plain", "steps=4", *words)
    refused = train("a", "steps=4", "checkpoint_every=2", "lr=0.02")
    assert refused.code == 2 and "or resume_with_changes=true to go on with them" in refused.err
    other = ["lr=0.02", "freeze=[0-1]", "resume_with_changes=true"]
    larger = train("a", "steps=4", *other, "batch=16")
    assert larger.code == 2 and "(batch: 32 -> 16)" in larger.err
    done = train("a", "steps=4", "checkpoint_every=2", *other)
    assert done.code == 0 and "from step 2 on: freeze: [] -> ['0-1']; lr: 0.01 -> 0.02" in done.out
    changes = json.loads((tmp_path / "a" / "summary.json").read_text())["changes"]
    assert changes[1] == {"step": 2, "key": "lr", "old": 0.01, "new": 0.02}
    at_2, at_4, plain = (weights(tmp_path / n, s) for n, s in (("a", 2), ("a", 4), ("plain", 4)))
    for key in at_4:
        assert torch.equal(at_4[key], at_2[key]) == key.startswith("0-1/"), key
        assert not torch.equal(at_4[key], plain[key]), key
