"""The plan command on shipped networks, one's own and Hugging Face configs; what auto chooses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Result
from torch import nn

from treeprop_ray import config, methods
from treeprop_ray.core.network import Blueprint, Shape
from treeprop_ray.core.tree import Tree
from treeprop_ray.methods import weighing
from treeprop_ray.methods.auto import decided, suits
from treeprop_ray.reporting import planning
from treeprop_ray.schedule.cluster import Cluster

Command = Callable[..., Result]


class Odd(nn.Module):
    """A block that cannot run without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(64, 64)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.map(z) * float(z.sum())


def own(model: config.Model, shape: Shape) -> Blueprint:
    """`model.name=test_plan_command:own`: blocks of two widths."""

    def block(l: int, r: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 64 * model.hidden), nn.GELU(), nn.Linear(64 * model.hidden, 64)
        )

    return Blueprint(model.blocks + 1, nn.Flatten, block, lambda: nn.Linear(64, shape.classes))


def odd(model: config.Model, shape: Shape) -> Blueprint:
    return Blueprint(4, nn.Flatten, lambda l, r: Odd(), lambda: nn.Linear(64, shape.classes))


def figures(result: Result) -> dict[str, list[str]]:
    """The cells of the table by way."""
    assert result.code == 0, result.err
    rows = [line.split("|") for line in result.out.splitlines() if line.startswith("|")][2:]
    return {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows}


def test_every_way_has_a_row_and_one_line_says_which_is_fastest(command: Command) -> None:
    result = command("plan", "model=gpt", "experiment=text_small", "nodes=2", "gpus=2", "batch=16")
    rows = figures(result)
    assert list(rows) == ["tree x replicas", "1F1B", "zero bubble", "data parallel"]
    times = {way: float(cells[2]) for way, cells in rows.items()}
    (last,) = [line for line in result.out.splitlines() if line.startswith("fastest: ")]
    assert last.startswith(f"fastest: {min(times, key=lambda way: times[way])}, ")
    assert "Ethernet" in result.out and "4 with 80 GB" in result.out


def test_the_figures_of_a_block_are_those_of_its_layers() -> None:
    """FLOP of matrices, parameters, and a deployed GPT-2 large of 774.03M without its tensors."""
    settings = config.load(["experiment=wikitext103_d6", "batch=1"])
    work = weighing.workload(settings, weighing.anatomy_of(settings), weighing.GPU)
    chain = work.block.parameters * 35 + work.head.parameters + work.stem.parameters
    assert chain == pytest.approx(774.03e6, rel=1e-4) and work.tree.N == 36
    flops = 1024 * (24 * 1280**2 + 2 * 1024 * 1280)
    assert work.block.each == pytest.approx(flops / 124.8e12, rel=1e-6)
    assert work.state == 4 * 1024 * 1280
    assert 20e6 < work.block.graph < 60e6  # no (T, T) matrix is kept


def test_own_modules_and_hugging_face_configs_are_planned(command: Command, tmp_path: Path) -> None:
    result = command(
        "plan", "model=test_plan_command:own", "model.blocks=3", "family=gaussian", "cpus=2"
    )
    assert "N = 4 blocks" in result.out and len(figures(result)) == 4
    about = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 6,
        "n_head": 2, "n_positions": 32, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(about))
    result = command("plan", f"model={tmp_path}", "data.length=32", "cpus=2", "batch=4")
    assert "N = 7 blocks" in result.out and len(figures(result)) == 4
    deployed = 6 * (12 * 64**2 + 13 * 64) + (100 + 32) * 64 + 2 * 64
    assert f"{deployed / 1e6:.1f}M parameters deployed" in result.out


def test_a_measured_block_scales_with_the_speed_of_a_device() -> None:
    settings = config.load(["experiment=digits", "model.hidden=128"])
    one, ten = (
        weighing.workload(settings, weighing.anatomy_of(settings), weighing.CORE, speed)
        for speed in (1.0, 1e6)
    )
    assert "measured" in one.note and one.block.forward(64) > 1e3 * ten.block.forward(64)
    assert one.blocks[1, 2].parameters == ten.blocks[1, 2].parameters == 128 * 128 + 128


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["experiment=digits_gru"], "plans are for networks of blocks"),
        (["speeds=[1,2]"], "speeds=[1.0, 2.0]: one for each of nodes=1"),
        (["nodes=2", "speeds=[1,-1]"], "must be above 0"),
        (["link=fast"], "link=fast: auto, nvlink, pcie, ethernet, shared, or GB/s"),
        (["nods=2"], "did you mean nodes?"),
        (["model=nowhere/at/all", "measure=true"], "measure=true"),
    ],
)
def test_bad_input_is_one_line(words: list[str], text: str, command: Command) -> None:
    result = command("plan", *words)
    assert result.code == 2 and len(result.error_lines) == 1 and text in result.err


def test_html_is_written_where_it_is_asked(command: Command, tmp_path: Path) -> None:
    result = command("plan", "experiment=digits", "cpus=2", "--html", f"to={tmp_path / 'p.html'}")
    assert result.code == 0 and f"wrote {tmp_path / 'p.html'}" in result.out
    assert "<svg" not in (tmp_path / "p.html").read_text()  # drawn by the page itself
    (tmp_path / "file").write_text("")
    result = command("plan", "cpus=2", "batch=2", "--html", f"to={tmp_path / 'file' / 'p.html'}")
    assert result.code == 2 and len(result.error_lines) == 1


def test_cfg_says_what_auto_chose_and_why(command: Command) -> None:
    result = command("train", "--cfg", "engine=ray", "ray.num_cpus=4", "microbatches=4")
    lines = [line for line in result.out.splitlines() if line.startswith("#")]
    assert any(line.startswith("# placement=auto: 1 host") for line in lines)
    assert any("backpropagation on the same 4 devices: 1F1B" in line for line in lines)
    stated = command("train", "--cfg", "engine=ray", "ray.num_cpus=4", "placement=packed")
    assert "placement=auto:" not in stated.out


def test_what_cannot_be_copied_is_not_copied() -> None:
    assert suits(config.load(["engine=ray", "replicas=2"]))
    assert not suits(config.load(["engine=train", "method=bp", "replicas=2"]))


def test_blocks_that_cannot_be_weighed_get_every_device() -> None:
    words = ["engine=ray", "model.name=test_plan_command:odd", "family=gaussian"]
    settings = methods.checked(config.load(words))
    cluster = Cluster(((4.0, 0.0),))
    choice = decided(settings, cluster)
    assert "not weighed" in choice.why[0] and choice.settings == settings
    plan = methods.of(settings).plan(choice.settings, Tree(4), cluster)
    assert len(plan.names) == 4


def test_times_are_read_at_a_glance() -> None:
    """Milliseconds, from a thousand of them on seconds; a large factor has no decimals."""
    told = [planning.duration(s) for s in (0.0046, 0.37232, 0.9994, 0.9996, 2.824, 93.4, 1234.6)]
    assert told == ["4.6 ms", "372 ms", "999 ms", "1 s", "2.82 s", "93.4 s", "1235 s"]
    assert [planning.times(f) for f in (1.284, 9.96, 73.03)] == ["1.28", "9.96", "73"]
