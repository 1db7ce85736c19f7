"""TreeProp through time: the tree over steps, its gradients, data, runs and export."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Result, StopAt, Stopped
from reference import time_loss
from torch import Tensor, nn
from torch.nn import functional as F

from treeprop_ray import config, data, methods
from treeprop_ray.core.bptt import fused, unrolled
from treeprop_ray.core.cells import CELLS, GRUCell
from treeprop_ray.core.optim import PartOptimizer
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import cut
from treeprop_ray.core.time_tree import Depth, Readout, TimeRule, first_states
from treeprop_ray.core.tree import Tree
from treeprop_ray.data.sequences import as_sequences, symbols
from treeprop_ray.hosts.base import Share
from treeprop_ray.hosts.time import BpttHost, TimeHost, WholeTreeHost
from treeprop_ray.models.rnn import TimeNetwork, as_torch_gru
from treeprop_ray.run import checkpoint
from treeprop_ray.run.trainer import Trainer
from treeprop_ray.schedule.time import whole_step

Command = Callable[..., Result]
SMALL = ["experiment=digits_gru", "model.hidden=8", "log_every=5", "epochs=2", "time.depth=3"]
B, S, H, C = 5, 3, 6, 4
CELL_NAMES = sorted(CELLS)


def time_network(kind: str, D: int) -> TimeNetwork:
    torch.manual_seed(D)
    parts: dict[str, nn.Module] = {f"f{d}": CELLS[kind](2**d * S, H) for d in range(D)}
    return TimeNetwork(D, {**parts, "readout": nn.Linear(H, C)}).double()


def batch(D: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randn(B, 2**D, S, dtype=torch.float64), torch.arange(B) % C


def fixed_batches(D: int, dtype: torch.dtype = torch.float64) -> data.Batches:
    x, y = batch(D)
    x = x.to(dtype)
    split = data.Split(x, y)
    return data.Batches(data.DataSet("", split, split, split, C, lambda x: x, x.dtype), B, 1)


def share_of(network: TimeNetwork, precision: str = "float32") -> Share:
    batches = fixed_batches(network.depth)
    return Share(network.parts(), OptimizerRule(), batches, precision=precision)


def run_whole(host: TimeHost, pieces: int = 1) -> None:
    """Gradients of a step, piece by piece."""
    for call, piece in zip(whole_step(pieces), cut(0, B, pieces), strict=True):
        host.run(call, piece, {})


def tree_host(
    network: TimeNetwork, K: int = 0, lam: float = 0.7, **switches: bool
) -> WholeTreeHost:
    return WholeTreeHost(share_of(network), TimeRule(network.depth, K, lam, **switches))


def tree_gradients(
    network: TimeNetwork, K: int = 0, pieces: int = 1, **switches: bool
) -> dict[str, Tensor]:
    run_whole(tree_host(network, K, **switches), pieces)
    return {k: p.grad for k, p in network.named_parameters() if p.grad is not None}


def states_node_by_node(network: TimeNetwork, x: Tensor) -> dict[int, Tensor]:
    """h_0 … h_{N-1} by the definition: one cell call for one node."""
    N = x.shape[1]
    h = {0: x.new_zeros(len(x), H)}
    for d in reversed(range(network.depth)):
        for n in range(2**d, N, 2 ** (d + 1)):
            l = n - 2**d
            h[n] = network.parts()[f"f{d}"](x[:, l:n].flatten(1), h[l].detach())
    return h


def loss_node_by_node(
    network: TimeNetwork, x: Tensor, y: Tensor, K: int = 0, lam: float = 0.0, finest: int = 0
) -> Tensor:
    """The whole objective as DESIGN states it, left to autograd."""
    N, parts = x.shape[1], network.parts()
    h = states_node_by_node(network, x)
    fixed = {n: state.detach() for n, state in h.items()}
    total = x.new_zeros(())
    for d in range(finest, network.depth):
        cell, step = parts[f"f{d}"], 2**d
        errors = []
        for n in range(step, N, 2 * step):
            r = n + step
            hat = cell(x[:, n:r].flatten(1), h[n])
            if r == N:
                total = total + F.cross_entropy(parts["readout"](hat), y)
            else:
                errors.append((hat - fixed[r]).square().sum(1).mean())
        if errors:
            total = total + torch.stack(errors).mean()
    swept = fixed
    for _ in range(K):
        before = {t: state.detach() for t, state in swept.items()}
        swept = {t: parts["f0"](x[:, t - 1], before[t - 1]) for t in range(1, N)}
        swept[0] = fixed[0]
    if K:
        apart = [(swept[t] - fixed[t]).square().sum(1).mean() for t in range(1, N)]
        total = total + lam * torch.stack(apart).mean()
    return total


@pytest.mark.parametrize("K", [0, 1, 3])
@pytest.mark.parametrize("kind", CELL_NAMES)
@pytest.mark.parametrize("D", [1, 2, 4])
def test_a_time_tree_has_the_gradients_of_the_formulas(kind: str, D: int, K: int) -> None:
    """An oracle that shares nothing with the code under test (tests/core/reference.py)."""
    network, (x, y) = time_network(kind, D), batch(D)
    mine = {k: g.clone() for k, g in tree_gradients(network, K).items()}
    network.zero_grad()
    time_loss(network, x, y, K, 0.7).backward()
    for name, p in network.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("loss", "gradient"), [("sum", "both"), ("mean", "one"), ("sum", "one")])
@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("kind", CELL_NAMES)
def test_the_literal_time_losses_have_the_gradients_of_the_formulas(
    kind: str, K: int, loss: str, gradient: str
) -> None:
    network, (x, y) = time_network(kind, 3), batch(3)
    switches = {"summed": loss == "sum", "one_step": gradient == "one"}
    mine = {k: g.clone() for k, g in tree_gradients(network, K, 2, **switches).items()}
    network.zero_grad()
    plain = tree_gradients(network, K, 2)
    assert any((mine[name] - g).abs().max() > 1e-6 for name, g in plain.items())
    network.zero_grad()
    time_loss(network, x, y, K, 0.7, loss, gradient).backward()
    for name, p in network.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-9, atol=1e-12)


# -- cells ------------------------------------------------------------------------------------


def test_the_gru_cell_is_torchs() -> None:
    mine, theirs = GRUCell(S, H).double(), nn.GRUCell(S, H).double()
    theirs.load_state_dict(mine.state_dict())
    x, h = torch.randn(B, S).double(), torch.randn(B, H).double()
    torch.testing.assert_close(mine(x, h), theirs(x, h))


@pytest.mark.parametrize("kind", CELL_NAMES)
def test_written_out_slopes_are_autograds(kind: str) -> None:
    cell = CELLS[kind](S, H).double()
    x = torch.randn(B, S).double()
    h = torch.randn(B, H, dtype=torch.float64, requires_grad=True)
    g = torch.randn(B, H).double()
    out = cell(x, h)
    out.backward(g)
    expected = {k: p.grad.clone() for k, p in cell.named_parameters() if p.grad is not None}
    cell.zero_grad()
    with torch.no_grad():
        kept = cell.room(1, B, h.detach())
        traced = cell.trace(cell.project(x), h.detach(), kept, 0)
        d = torch.empty(B, cell.blocks, H).double()
        dh = cell.slopes(cell.factors(kept), kept, 0, g, d, state=True)
        cell.add_gradients(x, h.detach(), d)
    torch.testing.assert_close(traced, out.detach())
    torch.testing.assert_close(dh, h.grad)
    for k, p in cell.named_parameters():
        torch.testing.assert_close(p.grad, expected[k])


@pytest.mark.parametrize(
    ("D", "kind", "millions"),
    [(6, "gru", 12.70), (6, "elman", 4.24), (8, "gru", 12.64), (8, "elman", 4.23)],
)
def test_deployed_parameters_are_the_papers(D: int, kind: str, millions: float) -> None:
    size = symbols(torch.zeros(1, 784), 2**D).shape[2]
    with torch.device("meta"):
        parts = [CELLS[kind](size, 2048), nn.Linear(2048, 10)]
    count = sum(p.numel() for part in parts for p in part.parameters())
    assert math.floor(count / 1e4 + 0.5) / 100 == millions


# -- the tree over time -----------------------------------------------------------------------


def all_states(network: TimeNetwork, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(h_0 … h_{N-1}, h_N_hat of every depth, coarsest first) by batched calls."""
    rule, states, hats = TimeRule(network.depth), first_states(x, H), []
    for d in reversed(range(network.depth)):
        cell = network.parts()[f"f{d}"]
        with torch.no_grad():
            states, hat = Depth(cell, d, rule).ahead(x, states)  # type: ignore[arg-type]
        hats.append(hat)
    return states, hats


@pytest.mark.parametrize("kind", CELL_NAMES)
@pytest.mark.parametrize("D", [1, 2, 3, 4])
def test_batched_is_node_by_node(kind: str, D: int) -> None:
    network, (x, _) = time_network(kind, D), batch(D)
    batched = all_states(network, x)[0]
    single = states_node_by_node(network, x)
    torch.testing.assert_close(batched, torch.stack([single[n] for n in range(2**D)], 1))


@pytest.mark.parametrize("D", [1, 3])
def test_no_node_sees_the_future_and_every_depth_sees_the_whole_prefix(D: int) -> None:
    """h_n depends on each of the symbols before n and on none after; h_N_hat on all."""
    network, (x, _) = time_network("gru", D), batch(D)
    states, hats = all_states(network, x)
    for t in range(2**D):
        other = x.clone()
        other[:, t] += 1.0
        moved, moved_hats = all_states(network, other)
        changed = (moved != states).any(-1).any(0)
        assert changed.tolist() == [n > t for n in range(2**D)]
        assert all((a != b).any() for a, b in zip(hats, moved_hats, strict=True))


@pytest.mark.parametrize("kind", CELL_NAMES)
@pytest.mark.parametrize(("D", "K"), [(1, 0), (1, 2), (2, 1), (3, 0), (3, 1), (3, 2), (3, 4)])
def test_gradients_are_those_of_the_stated_objective(kind: str, D: int, K: int) -> None:
    """Each depth's gradient passes its two applications and stops at the detached states."""
    network, (x, y) = time_network(kind, D), batch(D)
    loss_node_by_node(network, x, y, K, 0.7).backward()
    expected = {k: p.grad.clone() for k, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    found = tree_gradients(network, K)
    assert found.keys() == expected.keys()
    for k, grad in expected.items():
        torch.testing.assert_close(found[k], grad, msg=k)
    network.zero_grad()
    for k, grad in tree_gradients(network, K, pieces=2).items():
        torch.testing.assert_close(grad, expected[k], msg=f"two pieces: {k}")


def test_a_depths_gradient_ignores_the_finer_depths() -> None:
    """Exactly one step of the tree: other weights below change nothing above."""
    network = time_network("gru", 3)
    before = {k: g.clone() for k, g in tree_gradients(network, 2).items()}
    network.zero_grad()
    with torch.no_grad():
        for p in network.parts()["f0"].parameters():
            p.add_(0.3)
    after = tree_gradients(network, 2)
    for k, grad in before.items():
        same = torch.equal(grad, after[k])
        assert same == ("f1" in k or "f2" in k), k


def test_reported_losses_add_up_to_the_objective() -> None:
    network, (x, y) = time_network("gru", 3), batch(3)
    host = tree_host(network, 3)
    run_whole(host)
    settings = config.load([*SMALL, "time.sweeps=3", "time.lambda_cons=0.7"])
    weights = methods.of(settings).outline(settings, network.tree).weights
    losses = host.report(0, norms=True).losses
    assert {d: set(t) for d, t in losses.items()} == {d: set(t) for d, t in weights.items()}
    total = sum(weights[d][k] * v for d, terms in losses.items() for k, v in terms.items())
    with torch.no_grad():
        expected = loss_node_by_node(time_network("gru", 3), x, y, 3, 0.7)
    assert total == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(("K", "calls"), [(0, 2), (1, 3), (2, 3), (4, 5)])
def test_sweeps_cost_calls_of_the_deployed_cell_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, K: int, calls: int
) -> None:
    """K = 0: two applications and no more. The first of several sweeps is already there."""
    made = 0

    def counting(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(self: GRUCell, *args: object) -> Tensor:
            nonlocal made
            made += self.inputs == S
            return real(self, *args)

        return counted

    for step in ("advance", "trace"):
        monkeypatch.setattr(GRUCell, step, counting(getattr(GRUCell, step)))
    tree_gradients(time_network("gru", 3), K)
    assert made == calls


def test_the_tree_readout_is_the_finest_spine_path() -> None:
    network, (x, _) = time_network("gru", 3), batch(3)
    hats = all_states(network, x)[1]
    for path, hat in zip(network.tree.spine_paths, hats, strict=True):
        torch.testing.assert_close(network.path(path)(x), network.parts()["readout"](hat))


@pytest.mark.parametrize("B", [1, 3, 32])
def test_the_readout_answers_all_depths_as_it_answers_each(B: int) -> None:
    """Bit for bit: the local engine asks once, the depths as actors ask one by one."""
    readout, hats = Readout(nn.Linear(64, 10)), torch.randn(8, B, 64)
    labels = readout.onehot(torch.arange(B) % 10)
    with torch.no_grad():
        together = readout.answer([(d, "ce") for d in range(8)], hats, labels, B)
        for d, slope in enumerate(together):
            assert torch.equal(slope, readout.answer([(d, "ce")], hats[d : d + 1], labels, B)[0])


@pytest.mark.parametrize("kind", CELL_NAMES)
def test_bf16_gradients_are_near_those_of_float32(kind: str) -> None:
    found = []
    for precision in ("float32", "bf16"):
        network = time_network(kind, 3).float()
        share = replace(share_of(network, precision), batches=fixed_batches(3, torch.float32))
        run_whole(WholeTreeHost(share, TimeRule(3, 2)))
        found.append({k: p.grad for k, p in network.named_parameters() if p.grad is not None})
    for k, grad in found[0].items():
        assert 0 < (found[1][k] - grad).norm() < 0.05 * grad.norm(), k


# -- BPTT -------------------------------------------------------------------------------------


def test_bptt_unrolled_inside_torch_gru_and_the_deployed_chain_are_one_network() -> None:
    network, (x, _) = time_network("gru", 3), batch(3)
    cell, readout = network.parts()["f0"], network.parts()["readout"]
    assert isinstance(cell, GRUCell) and isinstance(readout, nn.Linear)
    logits = readout(unrolled(cell)(x))
    torch.testing.assert_close(logits, network.chain()(x))
    torch.testing.assert_close(logits, readout(fused(cell)(x)))
    torch.testing.assert_close(logits, as_torch_gru(cell, readout)(x))
    grads = []
    for torch_gru in (False, True):
        network.zero_grad()
        deployed = TimeNetwork(3, {"f0": cell, "readout": readout})
        run_whole(BpttHost(share_of(deployed), torch_gru))
        grads.append({k: p.grad.clone() for k, p in cell.named_parameters() if p.grad is not None})
    for k, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][k])


# -- optimizer recipe --------------------------------------------------------------------------


def test_boost_gives_the_deployed_cell_three_times_the_rate_and_clips_each_part() -> None:
    settings = config.load([*SMALL, "time.recipe=boost", "optimizer=sgd", "momentum=0", "clip=1",
                            "lr=0.1", "weight_decay=0"])  # fmt: skip
    rule = methods.of(settings).optimizer(settings, Tree(8), 1)
    parts = {name: nn.Linear(1, 1, bias=False) for name in ("f0", "f1", "f2")}
    before = {name: part.weight.item() for name, part in parts.items()}
    for part, grad in zip(parts.values(), (5.0, 5.0, 0.5), strict=True):
        part.weight.grad = torch.tensor([[grad]])
    PartOptimizer(parts, rule).step(0, None)
    moved = {name: before[name] - part.weight.item() for name, part in parts.items()}
    assert moved == pytest.approx({"f0": 0.3, "f1": 0.1, "f2": 0.05}, rel=1e-4)


# -- data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("D", "size", "zeros"), [(4, 49, 0), (6, 13, 48), (8, 4, 240), (10, 1, 240)]
)
def test_pixels_are_padded_at_the_start_and_cut(D: int, size: int, zeros: int) -> None:
    flat = torch.arange(1, 785).float().repeat(2, 1)
    x = symbols(flat, 2**D)
    assert x.shape == (2, 2**D, size)
    assert (x.flatten(1)[:, :zeros] == 0).all() and torch.equal(x.flatten(1)[:, zeros:], flat)


def test_one_fixed_permutation_before_the_padding() -> None:
    plain = data.load(config.load(["time.depth=3"]))
    made = as_sequences(plain, 8, permuted=True)
    again = as_sequences(plain, 8, permuted=True)
    order = made.permutation
    assert order is not None and sorted(order.tolist()) == list(range(64))
    assert order.tolist() != list(range(64)) and torch.equal(order, again.permutation)  # type: ignore[arg-type]
    for split in ("train", "test"):
        x = plain.split(split).x[:4]
        assert torch.equal(made.prepare(x).flatten(1), plain.prepare(x).flatten(1)[:, order])
    assert as_sequences(plain, 8, permuted=False).permutation is None


@pytest.mark.parametrize("length", [7, 64, 100])
def test_the_adding_task_has_two_marks_and_their_sum(length: int) -> None:
    words = ["experiment=adding_gru", f"data.length={length}", "data.samples=50", "time.depth=5"]
    made = data.load(config.load(words))
    x = made.train.x
    values, marks = x[..., 0].long(), x[..., 1].long()
    assert (marks.sum(1) == 2).all() and (marks[:, : length // 2].sum(1) == 1).all()
    assert torch.equal((values * marks).sum(1), made.train.y)
    assert made.input_shape == (32, -(-2 * length // 32)) and made.classes == 9


# -- runs -------------------------------------------------------------------------------------


def newest(folder: Path) -> checkpoint.Checkpoint:
    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None
    return found


@pytest.mark.parametrize("words", [
    ["method=tree", "time.sweeps=3"],
    ["method=tree", "time.recipe=lookahead", "time.sweeps=0", "microbatches=2"],
    ["method=bptt", "model.name=elman"], ["method=bptt_fused", "precision=bf16"],
])  # fmt: skip
def test_stop_and_resume_is_bitwise_one_run(
    command: Command, tmp_path: Path, words: list[str]
) -> None:
    words = [*SMALL, *words, f"out={tmp_path}", "checkpoint_every=7", "data.permuted=true"]
    assert command("train", *words, "name=whole").code == 0

    with pytest.raises(Stopped):
        Trainer.of(config.load([*words, "name=cut"]), callbacks=[StopAt(17)]).train()
    again = command("train", *words, "name=cut")
    assert again.code == 0 and "continuing from" in again.out
    whole, cut_ = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    for a, b in ((whole.weights, cut_.weights), (whole.optimizer, cut_.optimizer)):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_is_scored_exported_and_holds_its_permutation(
    command: Command, tmp_path: Path
) -> None:
    words = [*SMALL, f"out={tmp_path}", "name=r", "data.permuted=true", "time.sweeps=2"]
    result = command("train", *words)
    assert result.code == 0 and "tree" in result.out and "full" in result.out
    folder = tmp_path / "r"
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["final"]["test"]) == {"tree", "full"}
    assert (summary["N"], summary["depth"], summary["leak"]) == (8, 3, None)
    assert summary["parameters_deployed"] == 3 * 8 * (8 + 8 + 2) + 8 * 10 + 10
    assert (folder / "figures" / "depth_loss.png").stat().st_size > 1000
    shown = command("evaluate", f"run={folder}", "path=full")
    assert f"{100 * summary['final']['test']['full']['accuracy']:.2f} %" in shown.out
    assert command("evaluate", f"run={folder}", "path=[0,4,5,6,8]").code == 0
    bad = command("evaluate", f"run={folder}", "path=[0,3,8]")
    assert bad.code == 2 and "0->3 is no edge" in bad.err

    assert command("export", f"run={folder}").code == 0
    of_run = config.load_file(folder / "config.yaml")
    samples = data.load(of_run)
    x = samples.inputs(samples.test.x[:7])
    network = methods.of(of_run).assemble(of_run, samples.shape, newest(folder).weights)
    deployed = network.chain()
    program = torch.export.load(folder / "export" / "full" / "model.pt2").module()
    torch.testing.assert_close(program(x), deployed(x))
    from safetensors.torch import load_file

    gru, readout = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 10)
    gru.load_state_dict(load_file(folder / "export" / "full" / "gru.safetensors"))
    readout.load_state_dict(load_file(folder / "export" / "full" / "readout.safetensors"))
    torch.testing.assert_close(readout(gru(x)[1][0]), deployed(x))

    stored = folder / "permutation.json"
    stored.write_text(json.dumps(json.loads(stored.read_text())[::-1]))
    other = command("evaluate", f"run={folder}")
    assert other.code == 2 and "permutation" in other.err


def test_both_cells_learn_the_digits(command: Command, tmp_path: Path) -> None:
    """A few seconds each: the tree readout and the deployed chain are far above chance."""
    for kind, tree in (("gru", 0.8), ("elman", 0.5)):
        words = ["experiment=digits_gru", f"model.name={kind}", "epochs=12", f"out={tmp_path}"]
        command("train", *words, f"name={kind}", "model.hidden=48", "time.depth=3")
        final = json.loads((tmp_path / kind / "summary.json").read_text())["final"]["test"]
        assert final["tree"]["accuracy"] > tree and final["full"]["accuracy"] > 0.4, (kind, final)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["time.depth=0"], ["time.depth=0", "at least 1"]),
        (["time.depth=40"], ["time.depth=40", "at most 16"]),
        (["time.sweeps=-1"], ["time.sweeps=-1", "at least 0"]),
        (["time.lambda_cons=-1"], ["time.lambda_cons=-1", "at least 0"]),
        (["time.recipe=best"], ["time.recipe=best", "paper, boost, lookahead"]),
        (["time.recipe=lookahead", "time.shards=2"], ["time.shards=2", "lookahead"]),
        (["time.recipe=lookahead"], ["time.sweeps=4", "lookahead", "use 0"]),
        (
            ["time.recipe=lookahead", "time.sweeps=0", "time.gradient=one"],
            ["time.gradient=one", "lookahead has both"],
        ),
        (["method=bp"], ["method=bp", "bptt"]),
        (["method=bptt_fused", "model.name=elman"], ["bptt_fused", "elman"]),
        (["method=bptt", "engine=ray"], ["engine=ray", "method=bptt"]),
        (["method=bptt", "model.name=mlp"], ["method=bptt", "mlp"]),
        (["model.name=mlp", "data.permuted=true"], ["data.permuted=true", "mlp"]),
        (["model.name=mlp", "data.name=adding"], ["data.name=adding", "mlp"]),
        (["sigma=0.1"], ["sigma=0.1", "sigma=0"]),
        (["beta=0.5"], ["beta=0.5", "beta=0"]),
        (["data.name=adding", "data.length=1"], ["data.length=1", "at least 2"]),
    ],
)
def test_bad_input_is_one_line(
    command: Command, tmp_path: Path, words: list[str], parts: list[str]
) -> None:
    out = tmp_path / "runs"
    result = command("train", "experiment=digits_gru", f"out={out}", *words)
    assert result.code == 2 and len(result.error_lines) == 1
    assert all(part in result.err for part in parts), result.err
    assert not out.exists()


def test_the_recurrent_experiments_have_the_papers_settings() -> None:
    for name in ("smnist_gru", "smnist_elman", "psmnist_gru", "psmnist_elman"):
        s = config.load([f"experiment={name}"])
        assert (s.model.hidden, s.batch, s.optimizer, s.lr) == (2048, 128, "adamw", 1e-3)
        assert (s.weight_decay, s.clip, s.epochs, s.precision) == (1e-4, 5, 200, "bf16")
        assert (s.time.lambda_cons, s.time.recipe) == (1.0, "paper")
        assert s.data.permuted == name.startswith("p") and name.endswith(s.model.name)
        assert config.load([f"experiment={name}_small"]).model.hidden == 128


def test_nan_stops_with_depth_and_step(command: Command, tmp_path: Path) -> None:
    words = [*SMALL, f"out={tmp_path}", "name=nan", "lr=9e15", "optimizer=sgd", "clip=0"]
    result = command("train", *words)
    assert result.code == 1 and len(result.error_lines) == 1
    assert "step" in result.err and ("depth" in result.err or "gradient of" in result.err)
