"""The literal readings: each against its formula, and over any hosts to the bit what one does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import engine_of, local_engine, tiny_batches, tiny_network
from reference import tree_loss

from treeprop_ray import config, data, methods
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rng import normal_rows
from treeprop_ray.core.rule import Rule, cut
from treeprop_ray.hosts.base import Held, StepReport
from treeprop_ray.schedule.cluster import Cluster

SWITCHES: list[dict[str, Any]] = [
    {"input": "sample"},
    {"ce_at": "sample"},
    {"reduction": "sigma"},
    {"levels": "finest"},
    {"correction": "normalised", "correction_scale": 0.1},
    {"correction": "clipped", "correction_scale": 0.1},
]
BERNOULLI = {"family": "bernoulli", "alpha": 0.5, "beta": 0.5, "correction_scale": 5.0}
GAUSSIAN = {"alpha": 0.9, "beta": 0.5, "sigma": 0.1, "correction_scale": 3.0}


def word(switch: dict[str, Any]) -> str:
    return next(f"{key}={value}" for key, value in switch.items())


def gradients(rule: Rule, formulas: bool = False, pieces: int = 1) -> dict[str, torch.Tensor]:
    """Of a small tree, by the waves or by the formulas."""
    network = tiny_network(6, family=rule.family)
    if formulas:

        def draw(like: torch.Tensor, n: int) -> torch.Tensor:
            return normal_rows(like, range(len(like)), rule.seed, "noise", 0, n)

        tree_loss(network, vars(rule), *tiny_batches()(0), draw).backward()
    else:
        local_engine(network, rule, OptimizerRule(), tiny_batches(), pieces).gradients(0)
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in network.named_parameters()
    }


@pytest.mark.parametrize("objective", ["node", "node_all_ce"])
@pytest.mark.parametrize("base", [GAUSSIAN, BERNOULLI], ids=["gaussian", "bernoulli"])
@pytest.mark.parametrize("switch", [*SWITCHES, {"bernoulli": "literal"}], ids=word)
def test_a_switch_is_its_formula_and_changes_something(
    switch: dict[str, Any], base: dict[str, Any], objective: str
) -> None:
    plain = Rule(objective=objective, **base)
    rule = replace(plain, **switch)
    expected, found = gradients(rule, formulas=True), gradients(rule, pieces=2)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    before = gradients(plain, pieces=2)
    moved = max(float((before[name] - g).abs().max()) for name, g in found.items())
    if switch == {"bernoulli": "literal"} and rule.family == "gaussian":
        assert moved == 0
    else:
        assert moved > 1e-9


def test_the_finest_terms_are_those_of_the_bound() -> None:
    """N - 1 of them: each block of the chain before the head is in exactly one."""
    rule = Rule(levels="finest")
    for N in range(2, 20):
        for split in ("floor", "right_full"):
            tree = tiny_network(N, split).tree
            terms = [
                edge
                for node in tree.nodes.values()
                for edge, weight in zip(
                    (node.left, node.right), rule.node_weight(node), strict=True
                )
                if weight and edge[1] < N
            ]
            assert sorted(terms) == [(n - 1, n) for n in range(1, N)]


def test_sigma_is_the_kl_of_the_probe() -> None:
    """The terms of the finest level are together the probe's KL, nats per label."""
    rule = Rule(levels="finest", reduction="sigma", input="sample", **BERNOULLI)
    network = tiny_network(8, family="bernoulli")
    engine = local_engine(network, rule, OptimizerRule(), tiny_batches())
    probed = engine.probe(1, 0)
    engine.gradients(0)
    losses = engine.host.report(0, norms=False).losses
    weights = {n: rule.node_weight(node) for n, node in engine.tree.nodes.items()}
    own = sum(weights[n][0] * losses[n].get("own", 0.0) for n in weights)
    right = sum(weights[n][1] * losses[n].get("right", 0.0) for n in weights)
    assert own > 0 and right > 0
    assert probed["kl"] == pytest.approx(own + right, rel=1e-9)


def over_hosts(job: methods.Job, hosts: int) -> list[StepReport]:
    """Two steps over the hosts of a plan, in this process; 0 hosts: one for each node."""
    kind = replace(
        job.settings, engine="ray", placement="packed" if hosts else "per_node", hosts=hosts
    )
    plan = job.method.plan(kind, job.tree, Cluster(((64.0, 0.0),)))
    members = [job.method.host(job, plan, k) for k in range(len(plan.names))]
    reports = []
    for step in range(2):
        sent: dict[tuple[int, str], Held] = {}  # the packet of a tensor
        for call in job.method.calls(job, plan):
            packets = [sent[call.piece, name] for name in call.inputs]
            inputs = {name: t for packet in packets for name, t in packet.items()}
            piece = cut(step, job.places, job.settings.pieces)[call.piece]
            out = members[call.host].run(call, piece, inputs)
            for names in call.packets:
                packet = {name: out[name] for name in names}
                sent.update({(call.piece, name): packet for name in names})
        told = [host.report(step, norms=True) for host in members]
        for host in members:
            host.apply(step, [r.square_norms for r in told])
        reports.append(together(told))
    return reports


def together(reports: list[StepReport]) -> StepReport:
    whole = StepReport()
    for report in reports:
        whole.square_norms |= report.square_norms
        whole.sizes |= report.sizes
        for n, terms in report.losses.items():
            whole.losses.setdefault(n, {}).update(terms)
    return whole


WORDS = [
    ["input=sample", "ce_at=sample"],
    ["input=sample", "ce_at=sample", "beta=0", "alpha=1"],
    ["input=sample", "reduction=sigma", "correction=vjp"],
    ["levels=finest", "ce_at=sample", "correction=clipped", "correction_scale=0.3"],
    ["correction=normalised", "correction_scale=0.1", "mc_samples=2"],
    ["model.activation=sigmoid", "sigma=0", "bernoulli=literal", "input=sample", "ce_at=sample",
     "levels=finest", "reduction=sigma", "correction=vjp"],
]  # fmt: skip


@pytest.mark.parametrize("objective", ["node", "node_all_ce"])
@pytest.mark.parametrize("hosts", [0, 2, 3])
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_any_hosts_do_to_the_bit_what_one_does(
    words: list[str], hosts: int, objective: str
) -> None:
    base = ["model.blocks=8", "model.hidden=6", "model.activation=tanh", "batch=12", "alpha=0.9",
            "beta=0.5", "sigma=0.05", "microbatches=3", "clip=1",
            f"objective={objective}"]  # fmt: skip
    settings = config.load([*base, *words])
    samples = data.load(settings)
    local = engine_of(settings, samples, 20)
    found = over_hosts(local.job, hosts)
    for step, mine in enumerate(found):
        local.step(step, report=True)
        (expected,) = local.reports()
        assert mine.losses == expected.losses
        assert mine.square_norms == expected.square_norms
        assert mine.sizes == expected.sizes
        assert bool(mine.sizes) == (settings.beta > 0)
