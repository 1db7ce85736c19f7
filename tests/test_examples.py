"""Every example runs, in a reduced size; on both engines it ends with the same weights."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from warm import warm_ray

EXAMPLES = Path(__file__).parent.parent / "examples"
RAY = {"engine": "ray", "placement": "packed", "hosts": 2}
LONG = {"bias_bound.py"}  # a study, not a way in; tests/theory runs it


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_are_short() -> None:
    files = [p for p in EXAMPLES.glob("*.py") if p.name not in LONG]
    assert all(len(p.read_text().splitlines()) < 60 for p in files)


def test_own_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accuracy = example("own_blocks").main()
    assert accuracy["full"] > 0.9 and (tmp_path / "own_blocks.pt").is_file()


def test_an_own_cell_trains_alike_on_both_engines(tmp_path: Path) -> None:
    words = [f"out={tmp_path}", "epochs=3", "time.depth=2", "threads=1", "log_every=10"]
    there = ["engine=ray", "ray.num_cpus=2", "cpus_per_actor=0.5"]
    for more in (["name=a"], [*there, "name=b"]):  # as a script, whose folder Ray's workers search
        command = [sys.executable, str(EXAMPLES / "own_cell.py"), *words, *more]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    a, b = (weights(tmp_path / name) for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["final"]["test"]["full"]["accuracy"] > 0.2
    assert {key.partition("/")[0] for key in a} == {"f0", "f1", "readout"}


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {k: v for p in newest.glob("*.safetensors") for k, v in load_file(p).items()}


SMALL = {
    "resnet_cifar": {"limit": 64, "blocks": 3, "batch": 16, "epochs": 1},
    "finetune_hf": {"windows": 32, "layers": 3, "epochs": 1},
    "regression": {"blocks": 3, "epochs": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_an_example_trains_alike_on_both_engines(
    name: str, request: pytest.FixtureRequest, local_ray: None
) -> None:
    if name == "resnet_cifar":
        request.getfixturevalue("hub")
    module = example(name)
    a, b = (module.main(**SMALL[name], **where).network.state_dict() for where in ({}, RAY))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("epochs = 12", "epochs = 2")
    nbclient.NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    told = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert "epoch 2/2" in told  # progress in plain lines
    assert "agree on" in str(notebook.cells[-1].outputs[0]["data"])
