"""The probe measures what it says, changes nothing, and its bound is a bound."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import Result, local_engine, tiny_batches, tiny_network
from torch import Tensor
from torch.nn.functional import cross_entropy

from treeprop_ray.core import factor
from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.core.objective import tree_objective
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import Rule, cut
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine.local import LocalEngine
from treeprop_ray.hosts.probe_row import columns
from treeprop_ray.run import checkpoint
from treeprop_ray.schedule.ops import Layout
from treeprop_ray.schedule.owner import owner_of
from treeprop_ray.schedule.placement import pack
from treeprop_ray.schedule.probe import probe_calls

Command = Callable[..., Result]
GAUSSIAN = {"alpha": 0.9, "beta": 0.5, "sigma": 0.1, "correction_scale": 3.0}
BERNOULLI = {"family": "bernoulli", "alpha": 0.5, "beta": 0.5, "correction_scale": 5.0}

LITERAL = {**GAUSSIAN, "input": "sample", "ce_at": "sample", "levels": "finest"}


def tiny_engine(network: TreeNetwork, rule: Rule, pieces: int = 1) -> LocalEngine:
    return local_engine(network, rule, OptimizerRule(), tiny_batches(), pieces)


def flat(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


# -- alignment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [2, 3, 5, 8])
@pytest.mark.parametrize(
    "rule", [GAUSSIAN, BERNOULLI, LITERAL], ids=["gaussian", "bernoulli", "literal"]
)
@pytest.mark.parametrize("objective", ["node", "node_all_ce"])
def test_gradients_are_those_of_autograd(N: int, rule: dict[str, Any], objective: str) -> None:
    """Norms and cosine against one backward through the chain and one through the objective."""
    made = Rule(objective=objective, **rule)
    network = tiny_network(N, family=made.family)
    row = tiny_engine(network, made, pieces=2).probe(1, 0)
    x, y = tiny_batches().held_out(0)
    parameters: list[Tensor] = list(network.chain().parameters())
    g = flat(cross_entropy(network.chain()(x), y), parameters)
    objective_value, _ = tree_objective(network, made, x, y, cut(-1, 6, 1)[0])
    g_hat = flat(objective_value, parameters)
    assert row["norm_bp"] == pytest.approx(float(g.norm()), rel=1e-9)
    assert row["norm_tree"] == pytest.approx(float(g_hat.norm()), rel=1e-9)
    assert row["norm_bias"] == pytest.approx(float((g_hat - g).norm()), rel=1e-9)
    cosine = float(torch.dot(g, g_hat) / (g.norm() * g_hat.norm()))
    assert row["cosine"] == pytest.approx(cosine, rel=1e-9)
    assert row["descent"] == float((g_hat - g).norm() < g.norm())
    head = flat(cross_entropy(network.chain()(x), y), list(network.block((N - 1, N)).parameters()))
    assert row[f"share/{N - 1}-{N}"] == pytest.approx(float((head.norm() / g.norm()) ** 2))


@pytest.mark.parametrize("rule", [GAUSSIAN, BERNOULLI, {**GAUSSIAN, "correction": "vjp"}])
def test_two_blocks_give_the_last_block_the_update_of_backpropagation(rule: dict[str, Any]) -> None:
    network = tiny_network(2, family=rule.get("family", "gaussian"))
    row = tiny_engine(network, Rule(**rule)).probe(2, 0)
    assert row["cosine/1-2"] == pytest.approx(1, abs=1e-12)
    assert row["bias/1-2"] < 1e-12
    assert row["bias/0-1"] > 1e-3 and row["cosine/0-1"] < 1 - 1e-6  # the own term is not BP's


def test_without_correction_and_noise_two_blocks_are_backpropagation() -> None:
    row = tiny_engine(tiny_network(2), Rule()).probe(2, 0)
    assert row["cosine"] == pytest.approx(1, abs=1e-12)
    assert row["norm_bias"] < 1e-12 and row["descent"] == 1 and row["kl"] == 0


# -- divergences and the bound --------------------------------------------------------------------


@pytest.mark.parametrize("split", ["floor", "right_full"])
@pytest.mark.parametrize("N", [2, 5, 8, 13])
def test_kl_of_every_state_is_against_the_chains_own_block(N: int, split: str) -> None:
    """Without noise and correction z_n = f_left(z_l); the KL is half the squared error."""
    network = tiny_network(N, split)
    row = tiny_engine(network, Rule()).probe(1, 4)
    x, _ = tiny_batches().held_out(0)
    network.requires_grad_(False)
    z = {0: network.stem(x)}
    for level in range(1, network.tree.depth + 1):
        for node in network.tree.level(level):
            z[node.n] = network.block(node.left)(z[node.l])
    expected = {
        n: float(((z[n] - network.block((n - 1, n))(z[n - 1])) ** 2).sum(1).mean() / 2)
        for n in network.tree.nodes
    }
    for n, value in expected.items():
        assert row[f"kl/{n}"] == pytest.approx(value, rel=1e-9, abs=1e-15)
    assert row["kl"] == pytest.approx(sum(expected.values()), rel=1e-9)
    assert "F" not in row  # a point has no density


@pytest.mark.parametrize("rule", [GAUSSIAN, BERNOULLI], ids=["gaussian", "bernoulli"])
def test_parts_add_up(rule: dict[str, Any]) -> None:
    network = tiny_network(6, family=rule.get("family", "gaussian"))
    row = tiny_engine(network, Rule(**rule)).probe(2, 5)
    nodes = network.tree.nodes
    assert row["kl"] == pytest.approx(sum(row[f"kl/{n}"] for n in nodes), rel=1e-12)
    at_means = row["kl"] + row["kl_constant"] + row[f"tree_ce/{network.tree.spine[-1].n}"]
    assert row["F_mean"] == pytest.approx(at_means, rel=1e-12)
    assert row["F_kl"] == pytest.approx(sum(row[f"log_ratio/{n}"] for n in nodes), rel=1e-12)
    assert row["F"] == pytest.approx(row["F_kl"] + row["F_ce"], rel=1e-12)
    assert row["gap"] == pytest.approx(row["F"] - row["nll"], rel=1e-12)
    assert row["gap"] > 0 and 1 <= row["ess"] <= 5
    assert set(row) | {"step", "epoch"} <= set(columns(network.tree))


def test_bound_and_likelihood_of_binary_states_are_those_of_enumeration() -> None:
    """N = 3, width 4: 256 hidden configurations, all of them summed."""
    rule = Rule(**{**BERNOULLI, "correction_scale": 4.0})
    network = tiny_network(3, family="bernoulli")
    row = tiny_engine(network, rule).probe(1, 800)
    x, y = tiny_batches().held_out(0)
    states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)), dtype=x.dtype)
    first, second, head = (network.block((n, n + 1)) for n in range(3))

    def log_bernoulli(z: Tensor, p: Tensor) -> Tensor:
        return (z * p.log() + (1 - z) * (1 - p).log()).sum(-1)

    def factor_mean(mu_fwd: Tensor, label: Tensor) -> Tensor:
        """Step 3 of a spine node, by hand: the gradient of the batch mean, 6 samples."""
        leaf = mu_fwd.detach().requires_grad_()
        ce = cross_entropy(head(leaf), label.expand(len(leaf)), reduction="sum") / 6
        (slope,) = torch.autograd.grad(ce, leaf)
        return (mu_fwd - 0.5 * 4 * slope).clamp(factor.EPS, 1 - factor.EPS).detach()

    F = nll = 0.0
    for x_i, y_i in zip(x, y, strict=True):
        rho_1 = first(network.stem(x_i[None])).detach()  # mean of p(z_1 | x)
        rho_2 = second(states).detach()  # mean of p(z_2 | z_1), a row for each z_1
        pi_1, pi_2 = factor_mean(rho_1, y_i), factor_mean(rho_2, y_i)
        ce = cross_entropy(head(states), y_i.expand(16), reduction="none").detach()
        log_p = (
            log_bernoulli(states, rho_1)[:, None]
            + log_bernoulli(states[None], rho_2[:, None])
            - ce[None]
        )
        log_q = log_bernoulli(states, pi_1)[:, None] + log_bernoulli(states[None], pi_2[:, None])
        nll -= float(torch.logsumexp(log_p.flatten(), 0)) / 6
        F += float((log_q.exp() * (log_q - log_p)).sum()) / 6
    assert F - nll > 0.02  # q is visibly not the posterior
    assert row["F"] == pytest.approx(F, rel=0.02)
    assert row["nll"] == pytest.approx(nll, rel=0.01)
    assert row["F"] > nll


def test_gaussian_bound_stays_above_the_likelihood_of_many_draws() -> None:
    network = tiny_network(4)
    rule = Rule(**{**GAUSSIAN, "sigma": 0.3})
    few, many = (tiny_engine(network, rule).probe(1, draws) for draws in (20, 1500))
    assert many["nll"] < few["nll"] < few["F"]
    assert many["F"] == pytest.approx(few["F"], rel=0.1)


def test_leak_is_clean_minus_tree_at_every_spine_node() -> None:
    network = tiny_network(8)
    x, y = tiny_batches().held_out(0)
    calm = Rule(objective="node_all_ce")
    wild = Rule(objective="node_all_ce", alpha=1, beta=1, correction="vjp")
    for rule in (calm, wild):
        row = tiny_engine(network, rule).probe(1, 0)
        _, terms = tree_objective(network, rule, x, y, cut(-1, 6, 1)[0])
        for node, path in zip(network.tree.spine, network.tree.spine_paths, strict=True):
            clean = float(cross_entropy(network.path(path)(x), y).detach())
            tree = float(terms[node.n]["ce"])
            assert row[f"leak/{node.n}"] == pytest.approx(clean - tree, rel=1e-9, abs=1e-12)
            # no label is in any state without correction, nor in what the root reads
            moved = rule is wild and node is not network.tree.root
            assert (abs(clean - tree) > 0.01) == moved


# -- schedule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [2, 3, 5, 8, 13, 17])
@pytest.mark.parametrize("kind", ["single", "per_node", "packed"])
def test_calls_visit_every_block_once_and_read_what_was_made(N: int, kind: str) -> None:
    tree = Tree(N)
    layout = {
        "single": Layout.single(tree),
        "per_node": Layout({n: n for n in tree.nodes}),
        "packed": pack(tree, min(3, len(tree.nodes))),
    }[kind]
    calls = probe_calls(tree, Rule(), layout, True, pieces=2)
    for name, verbs in (("chain", ["ahead", "back"]), ("sweep", ["lift", "settle", "weigh"])):
        made: set[tuple[int, int, str]] = set()
        fellows: dict[tuple[int, str], tuple[str, ...]] = {}  # what travels together
        for call in calls[name]:
            made |= {
                (call.piece, call.host, fellow)
                for read in call.inputs
                for fellow in fellows[call.piece, read]
            }
            fellows |= {(call.piece, n): packet for packet in call.packets for n in packet}
            for op in call.ops:
                assert all((call.piece, call.host, read) in made for read in op.reads), op
                made |= {(call.piece, call.host, written) for written in op.writes}
        for verb in verbs:
            done = sorted(op.n for call in calls[name] for op in call.ops if op.verb == verb)
            assert done == sorted([*tree.nodes] * 2)
    for n in tree.nodes:
        owner = owner_of(tree, (n - 1, n))
        assert (n - 1, n) in (owner.left, owner.right)


# -- neutrality -----------------------------------------------------------------------------------

SMALL = ["model.hidden=12", "model.blocks=4", "batch=64", "log_every=5", "epochs=2", "clip=0.5"]
NOISY = ["model.activation=tanh", "sigma=0.05", "alpha=1", "beta=0.5", "mc_samples=2"]
TIMES = ["step_seconds", "data_share"]


@pytest.mark.parametrize("words", [NOISY, ["microbatches=3"]], ids=["gaussian", "bernoulli"])
def test_a_probed_run_is_bitwise_the_run_without(
    command: Command, tmp_path: Path, words: list[str]
) -> None:
    ends = []
    for name, more in (("plain", []), ("probed", ["probe.every=7", "probe.batches=2"])):
        torch.manual_seed(5)
        run = command("train", *SMALL, *words, f"out={tmp_path}", f"name={name}", *more)
        assert run.code == 0
        found = checkpoint.newest(tmp_path / name / "checkpoints")
        assert found is not None
        ends.append((found, torch.get_rng_state(), pd.read_csv(tmp_path / name / "metrics.csv")))
    (plain, rng, rows), (probed, rng_probed, rows_probed) = ends
    for a, b in ((plain.weights, probed.weights), (plain.optimizer, probed.optimizer)):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert torch.equal(rng, rng_probed)
    pd.testing.assert_frame_equal(rows.drop(columns=TIMES), rows_probed.drop(columns=TIMES))
    probes = pd.read_csv(tmp_path / "probed" / "probe.csv")
    assert list(probes.step) == [0, 7, 14, 21, 28, 35, 40]
    assert not (tmp_path / "plain" / "probe.csv").exists()


def test_host_is_left_as_it_was() -> None:
    engine = tiny_engine(tiny_network(5), Rule(**GAUSSIAN))
    engine.step(0, report=True)
    torch.manual_seed(1)
    rng, batch = torch.get_rng_state(), engine.host.current
    first = engine.probe(2, 3)
    assert torch.equal(rng, torch.get_rng_state()) and engine.host.current is batch
    assert all(p.grad is None for m in engine.host.parts.values() for p in m.parameters())
    assert all(m.training for m in engine.host.parts.values())
    assert not any(losses.terms for losses in engine.host.losses.values())
    assert not engine.host.held and engine.host.gauge is None
    assert engine.probe(2, 3) == first  # the same batches and draws every time


# -- the command ----------------------------------------------------------------------------------


def test_command_adds_a_row_to_a_finished_run(command: Command, tmp_path: Path) -> None:
    words = [*SMALL, f"out={tmp_path}", "name=one", "probe.every=20", "probe.draws=2"]
    assert command("train", *words).code == 0
    folder = tmp_path / "one"
    before = pd.read_csv(folder / "probe.csv")
    result = command("probe", f"run={folder}", "batches=4", "draws=2")
    assert result.code == 0 and "cosine" in result.out and "leak" in result.out
    after = pd.read_csv(folder / "probe.csv")
    pd.testing.assert_frame_equal(before, after)  # the last row is measured again, the same
    assert command("probe", f"run={folder}", "checkpoint=20", "batches=1", "draws=0").code == 0
    changed = pd.read_csv(folder / "probe.csv").set_index("step")
    assert list(changed.index) == [0, 20, 40]
    assert math.isnan(changed.loc[20, "F"]) and not math.isnan(changed.loc[40, "F"])
    for name in ("alignment", "blocks", "kl", "tree", "leak", "bound"):
        assert (folder / "figures" / f"probe_{name}.png").stat().st_size > 1000
    out = tmp_path / "results"
    assert command("probe", "mode=table", f"run=[{folder}]", f"out={out}").code == 0
    text = (out / "probe.md").read_text()
    assert "## one" in text and "python -m treeprop_ray.probe mode=table" in text
    assert all(f"\n| {n}-{n + 1} " in text for n in range(4))  # a line for every chain block
    assert len(pd.read_csv(out / "probe" / "one.csv")) == 3
    assert (out / "probe" / "one-probe_alignment.png").is_file()
    two = shutil.copytree(folder, tmp_path / "two")  # a section stays when its run folder is gone
    table = ["mode=table", f"run=[{two}]", f"out={out}"]
    assert command("probe", *table, "keep=[one]").code == 0
    both = (out / "probe.md").read_text()
    assert text.split("\nThis file:")[0] in both and "\n## two\n" in both
    refused = command("probe", *table, "keep=[three]")
    assert refused.code == 2 and "keep=three" in refused.err
    assert command("probe", "mode=list", f"run={folder}", f"out={out}").code == 0
    assert command("probe", "mode=list", f"run={two}", f"out={out}").code == 0
    lines = pd.read_csv(out / "probe_list.csv")
    assert list(lines.run) == ["one", "two"] and list(lines.probes) == [3, 3]


def test_table_says_what_the_rows_say() -> None:
    from treeprop_ray.reporting.probe_table import verdict

    steps = range(6)
    rising = {"cosine": [0.2, 0.3, 0.4, 0.5, 0.6, 0.7], "kl/1": [6, 5, 4, 3, 2, 1]}
    falling = {"cosine": [0.7, 0.6, 0.5, 0.4, 0.3, -0.2], "kl/1": [1, 2, 3, 4, 5, 6]}
    for given, words in (
        (rising, ("positive at 6 of 6", "it rises", "KL of 1 of 1")),
        (falling, ("positive at 5 of 6", "it does not rise", "KL of 0 of 1", "smallest -0.200")),
    ):
        rows = pd.DataFrame({"step": steps, **given, "descent": [1.0] * 6})
        text = verdict(rows.assign(kl=rows["kl/1"]))
        assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method=bp", "probe.every=5"], "probe.every=5"),
        (["data.validation=0"], "data.validation=0.0: must be greater than 0"),
        (["probe.every=-1"], "probe.every=-1"),
        (["probe.draw=3"], "did you mean probe.draws"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    command: Command, tmp_path: Path, words: list[str], says: str
) -> None:
    result = command("train", *SMALL, f"out={tmp_path}", *words)
    assert result.code == 2 and len(result.error_lines) == 1 and says in result.err
    assert not list(tmp_path.iterdir())


def test_runs_that_cannot_be_probed_are_refused(command: Command, tmp_path: Path) -> None:
    assert command("train", *SMALL, "method=bp", f"out={tmp_path}", "name=bp").code == 0
    for words, says in (
        ([f"run={tmp_path / 'bp'}"], "method=bp"),
        (["run=nowhere"], "run=nowhere"),
        ([f"run={tmp_path / 'bp'}", "batches=0"], "batches=0"),
    ):
        result = command("probe", *words)
        assert result.code == 2 and len(result.error_lines) == 1 and says in result.err
