"""A recurrent cell of one's own: its gradients, its runs, and what a module must not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import own_cells
import pytest
import torch
from conftest import Result
from safetensors.torch import load_file
from torch import Tensor, nn

from treeprop_ray import config, data, methods
from treeprop_ray.core.cells import GRUCell
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.own_cell import OwnCell
from treeprop_ray.core.rule import cut
from treeprop_ray.core.time_tree import TimeRule
from treeprop_ray.hosts.base import Share
from treeprop_ray.hosts.time import BpttHost, TimeHost, WholeTreeHost
from treeprop_ray.models.rnn import TimeNetwork
from treeprop_ray.run import checkpoint
from treeprop_ray.schedule.time import whole_step

Command = Callable[..., Result]
D, B, S, H, C = 3, 6, 2, 5, 4
OWN = ["experiment=digits_gru", "model.name=own_cells:gated", "model.recurrent=true",
       "model.hidden=6", "time.depth=2", "time.sweeps=2", "data.limit=256"]  # fmt: skip


class WithDiagonal(nn.GRUCell):
    """Knows the diagonals of its Jacobians, as the shipped cell does."""

    def diagonal(self, x: Tensor, h: Tensor) -> Tensor:
        same = GRUCell(self.input_size, self.hidden_size).to(h.dtype)
        same.load_state_dict(self.state_dict())
        kept = same.room(1, len(h), h)
        same.trace(same.project(x), h, kept, 0)
        return same.diagonal(same.factors(kept), kept, 0)


def gradients(
    host: Callable[[Share], TimeHost], kind: str, precision: str = "float32"
) -> dict[str, Tensor]:
    """Of a step in two pieces, with the weights of the same seed whatever the kind of cell."""
    torch.manual_seed(3)
    shipped = {f"f{d}": GRUCell(2**d * S, H) for d in range(D)}
    parts: dict[str, nn.Module] = {**shipped, "readout": nn.Linear(H, C)}
    if kind != "shipped":
        made = WithDiagonal if kind == "diagonal" else nn.GRUCell
        for name, cell in shipped.items():
            parts[name] = OwnCell(made(cell.inputs, H), cell.inputs, H)
            parts[name].step.load_state_dict(cell.state_dict())
    dtype = torch.float32 if precision == "bf16" else torch.float64
    network = TimeNetwork(D, parts).to(dtype)
    torch.manual_seed(7)
    x = torch.randn(B, 2**D, S, dtype=torch.float64)
    split = data.Split(x.to(dtype), torch.arange(B) % C)
    batches = data.Batches(data.DataSet("", split, split, split, C, lambda x: x, dtype), B, 1)
    share = Share(network.parts(), OptimizerRule(), batches, precision=precision)
    worker = host(share)
    for call, piece in zip(whole_step(2), cut(0, B, 2), strict=True):
        worker.run(call, piece, {})
    named = network.named_parameters()
    return {k.replace(".step.", "."): p.grad for k, p in named if p.grad is not None}


HOSTS: dict[str, Callable[[Share], TimeHost]] = {
    "no sweeps": lambda share: WholeTreeHost(share, TimeRule(D)),
    "a sweep": lambda share: WholeTreeHost(share, TimeRule(D, 1)),
    "sweeps": lambda share: WholeTreeHost(share, TimeRule(D, 3, 0.7)),
    "literal": lambda share: WholeTreeHost(share, TimeRule(D, 2, summed=True, one_step=True)),
    "lookahead": lambda share: WholeTreeHost(share, TimeRule(D, lookahead=True)),
    "newton": lambda share: WholeTreeHost(share, TimeRule(D, 2, newton=True, damping=0.1)),
    "bptt": lambda share: BpttHost(share, torch_gru=False),
}


@pytest.mark.parametrize("kind", ["own", "diagonal"])
@pytest.mark.parametrize("host", HOSTS)
def test_an_own_cell_has_the_gradients_of_the_shipped_one(host: str, kind: str) -> None:
    """torch.nn.GRUCell as a cell of one's own, against the written-out GRU."""
    mine, shipped = gradients(HOSTS[host], kind), gradients(HOSTS[host], "shipped")
    assert mine.keys() == shipped.keys()
    for name, gradient in shipped.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("host", ["sweeps", "lookahead", "newton"])
def test_under_autocast_it_has_gradients_of_16_bits(host: str) -> None:
    mine = gradients(HOSTS[host], "own", "bf16")
    for name, gradient in gradients(HOSTS[host], "own").items():
        assert mine[name].dtype is torch.float32
        assert (mine[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-4, name


def test_it_is_trained_resumed_and_exported(command: Command, tmp_path: Path) -> None:
    words = [*OWN, f"out={tmp_path}"]
    for name, epochs in (("a", 2), ("b", 1), ("b", 2)):
        done = command("train", *words, f"name={name}", f"epochs={epochs}")
        assert done.code == 0, done.err
    whole, resumed = (checkpoint.newest(tmp_path / name / "checkpoints") for name in "ab")
    assert whole and resumed
    assert all(torch.equal(t, resumed.weights[k]) for k, t in whole.weights.items())
    assert torch.equal(whole.weights["f0/step.unused"], torch.zeros(2))

    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["cost"] == {"work": 20, "critical_path": 5}

    done = command("export", f"run={tmp_path / 'a'}")
    assert done.code == 0, done.err
    folder = tmp_path / "a" / "export" / "full"
    samples = data.load(config.load(words))
    x = samples.inputs(samples.test.x[:7])
    cell, readout = own_cells.Gated(x.shape[2], 6), nn.Linear(6, 10)
    cell.load_state_dict(load_file(folder / "cell.safetensors"))
    readout.load_state_dict(load_file(folder / "readout.safetensors"))
    h = torch.zeros(7, 6)
    with torch.no_grad():
        for x_t in x.unbind(1):
            h = cell(x_t, h)
        program = torch.export.load(folder / "model.pt2").module()
        torch.testing.assert_close(program(x), readout(h))
    done = command("evaluate", f"run={tmp_path / 'a'}")
    assert done.code == 0, done.err
    done = command("export", f"run={tmp_path / 'a'}", "format=hf")
    assert done.code == 2 and "needs gpt" in done.err


@pytest.mark.parametrize(("factory", "told"), {
    "pair": "the cell must give one state, not a tuple, for x (16, 16) and h (16, 6)",
    "width": "the cell must give a state like h, not (16, 5), for x",
    "dropout": "the cell must give the same state for the same x and h",
    "place": "the cell must give the same state for the same x and h",
    "batch": "the cell must treat every row on its own",
    "cut": "the cell has no weight that trains",
    "narrow": "a cell for x (batch, 16) and h (batch, 6): RuntimeError",
    "number": "must give a torch module for model.recurrent=true, not int",
}.items())  # fmt: skip
def test_what_is_no_cell_is_one_line(
    factory: str, told: str, command: Command, tmp_path: Path
) -> None:
    words = [*OWN, f"out={tmp_path}", f"model.name=own_cells:{factory}"]
    done = command("train", *words)
    assert done.code == 2 and len(done.error_lines) == 1
    assert f"model.name=own_cells:{factory}: {told}" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "told"), [
    (["model.name=gru"], "model.recurrent=true"),
    (["model.recurrent=false", "method=bptt"], "needs model.recurrent=true"),
    (["method=bp"], "for model.name=own_cells:gated use method=bptt"),
    (["method=bptt_fused"], "torch has no fused"),
    (["data.name=wikitext2"], "text needs model.name=gpt"),
    (["compile=true"], "compile=true"),
    (["probe.every=1"], "probe.every=1"),
])  # fmt: skip
def test_what_does_not_suit_an_own_cell_is_one_line(
    words: list[str], told: str, command: Command
) -> None:
    done = command("train", "--cfg", *OWN, *words)
    assert done.code == 2 and len(done.error_lines) == 1 and told in done.err


def test_its_run_has_a_name_of_its_own_and_others_keep_theirs() -> None:
    plain = config.load(["experiment=digits_gru"])
    assert "recurrent" not in config.run_name(plain)
    own = config.load(OWN)
    assert methods.of(own).over_time and config.run_name(own) != config.run_name(plain)
