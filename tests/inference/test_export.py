"""Export: the network leaves the package, and gives the same logits without it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Result
from safetensors.torch import load_file

from treeprop_ray import config, data
from treeprop_ray.run.reading import load_network, pick_checkpoint

Command = Callable[..., Result]


@pytest.fixture
def run(command: Command, tmp_path: Path) -> Path:
    words = ["model.hidden=12", "epochs=2", f"out={tmp_path}", "name=run"]
    assert command("train", *words).code == 0
    return tmp_path / "run"


WITHOUT_US = """
import sys, torch
program = torch.export.load(sys.argv[1] + "/model.pt2").module()
x = torch.load(sys.argv[1] + "/x.pt", weights_only=True)
torch.save(program(x), sys.argv[1] + "/logits.pt")
assert not [m for m in sys.modules if m.startswith("treeprop")]
"""


@pytest.mark.parametrize("path", ["full", "spine-2", "[0,4,6,7,8]"])
def test_export_runs_without_the_package_and_gives_equal_logits(
    command: Command, run: Path, tmp_path: Path, path: str
) -> None:
    target = tmp_path / "out"
    assert command("export", f"run={run}", f"path={path}", f"to={target}").code == 0
    settings = config.load_file(run / "config.yaml")
    samples = data.load(settings)
    network = load_network(settings, samples, pick_checkpoint(str(run), "last"))
    indices = network.tree.named_paths.get(path) or [0, 4, 6, 7, 8]
    x = samples.inputs(samples.test.x[:37])
    torch.save(x, target / "x.pt")
    subprocess.run([sys.executable, "-I", "-c", WITHOUT_US, str(target)], check=True, cwd="/")
    with torch.no_grad():
        expected = network.path(indices)(x)
    assert torch.equal(torch.load(target / "logits.pt", weights_only=True), expected)


def test_weights_load_into_a_hand_written_sequential(
    command: Command, run: Path, tmp_path: Path
) -> None:
    """model.safetensors and model.pt hold the same plain state_dict; model.json describes it."""
    target = tmp_path / "out"
    command("export", f"run={run}", "path=spine-1", f"to={target}")
    state = load_file(target / "model.safetensors")
    same = torch.load(target / "model.pt", weights_only=True)
    assert all(torch.equal(state[k], same[k]) for k in state)
    about = json.loads((target / "model.json").read_text())
    assert about["path"] == [0, 4, 8] and about["input_shape"] == [1, 8, 8]
    assert about["parameters"] == sum(v.numel() for v in state.values())
    assert sorted(about["tensors"]) == sorted(state)
    assert len({path.stat().st_mode for path in target.glob("model.*")}) == 1


def test_evaluate_agrees_with_the_summary(command: Command, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    result = command("evaluate", f"run={run}")
    for name, score in summary["final"]["test"].items():
        line = next(row for row in result.out.splitlines() if row.startswith(name))
        assert f"{100 * score['accuracy']:.2f} %" in line


def test_evaluate_takes_any_path(command: Command, run: Path) -> None:
    result = command("evaluate", f"run={run}", "path=[0,2,4,5,6,8]", "split=validation")
    assert result.code == 0 and "0-2-4-5-6-8" in result.out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["path=[0,3,8]"], "0->3 is no edge"),
        (["path=spine-9"], "names: spine-1"),
        (["path=[0,4]"], "end at N=8"),
        (["checkpoint=999"], "steps kept: 20, 40"),
        (["checkpoint=first"], "last, best or a step number"),
    ],
)
@pytest.mark.parametrize("name", ["evaluate", "export"])
def test_a_wrong_path_or_checkpoint_is_named(
    command: Command, run: Path, name: str, words: list[str], part: str
) -> None:
    result = command(name, f"run={run}", *words)
    assert result.code == 2 and part in result.err and len(result.error_lines) == 1


@pytest.mark.parametrize("name", ["evaluate", "export"])
def test_a_folder_that_is_no_run_is_named(command: Command, tmp_path: Path, name: str) -> None:
    assert "give a run folder" in command(name).err
    assert "no such folder" in command(name, "run=/no/such").err
    assert "no config.yaml" in command(name, f"run={tmp_path}").err
