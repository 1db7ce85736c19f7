"""finish_sweeps: all blocks of the chain at once, several times, not one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_finish import GPT, SMALL, engine_for
from torch import Tensor
from torch.nn import functional as F

from treeprop_ray import config, data, methods
from treeprop_ray.benchmarks import rehearsal
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.cost import chain_cost, sweep_cost
from treeprop_ray.schedule.ops import STEP
from treeprop_ray.schedule.sweeps import units_of

EXACT = ["precision=float64", "objective=node"]


def gradients(words: list[str]) -> dict[str, Tensor]:
    engine = engine_for([*EXACT, *words])
    engine.gradients(0)
    engine.host.catch_up()
    return {
        f"{part}/{key}": p.grad
        for part, module in engine.host.parts.items()
        for key, p in module.named_parameters()
        if p.grad is not None
    }


def loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def by_definition(engine: Any, K: int) -> dict[str, Tensor]:
    """The formulas of schedule/sweeps.py unit by unit, every unit in every sweep."""
    tree, parts = engine.tree, engine.host.parts
    x, y = engine.job.batches()(0)

    def run(edges: tuple[Edge, ...], z: Tensor) -> Tensor:
        for edge in edges:
            z = parts[edge_name(edge)](z)
        return z

    units = [unit.edges for unit in units_of(tree)]
    z0 = run((STEM,), x)
    start = [z0.detach().clone() for _ in units]
    for k in range(K):
        starts = [z.requires_grad_() for z in start]
        ends = [run(edges, z) for edges, z in zip(units, starts, strict=True)]
        adds = [(end - z).detach() for end, z in zip(ends, starts, strict=True)]
        if k < K - 1:
            start = [(z0 + sum(adds[:u])).detach() for u in range(len(units))]
    end = (z0 + sum(adds)).detach().requires_grad_()
    (a,) = torch.autograd.grad(loss(run((tree.head,), end), y), end)
    pulls = [torch.zeros_like(a)] * len(units)
    for _ in range(K):
        slopes = [a + sum(pulls[u + 1 :]) for u in range(len(units))]
        back = torch.autograd.grad(ends, starts, slopes, retain_graph=True)
        pulls = [b - s for b, s in zip(back, slopes, strict=True)]
    total = sum((e * s).sum() for e, s in zip(ends, slopes, strict=True))
    total = total + loss(run((tree.head,), end.detach()), y)
    total = total + (z0 * (a + sum(pulls))).sum()
    named = {f"{p}/{k}": t for p, module in parts.items() for k, t in module.named_parameters()}
    grads = torch.autograd.grad(total, named.values(), allow_unused=True)
    return {k: g for k, g in zip(named, grads, strict=True) if g is not None}


@pytest.mark.parametrize("blocks", [1, 4, 7, 9, 12])
@pytest.mark.parametrize("K", [1, 2, 3])
def test_gradients_are_those_of_the_formula(blocks: int, K: int) -> None:
    words = [*GPT, f"model.blocks={blocks}", "finish=1", f"finish_sweeps={K}"]
    expected, found = by_definition(engine_for([*EXACT, *words]), K), gradients(words)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[k], v, atol=1e-13) for k, v in expected.items())


@pytest.mark.parametrize("words", [[], ["microbatches=3", "recompute=true"], ["freeze=[stem]"]])
def test_enough_sweeps_are_backpropagation(words: list[str]) -> None:
    """Residual blocks: each sweep brings the gradients nearer."""
    words = [*GPT, *words]
    exact = gradients([*words, "method=bp"])
    errors = []
    for K in (1, 2, 3, 4):
        found = gradients([*words, "finish=1", f"finish_sweeps={K}"])
        assert found.keys() == exact.keys()
        errors.append(max(float((found[k] - v).abs().max()) for k, v in exact.items()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-12


@pytest.mark.parametrize(
    ("words", "placement"),
    [
        ([*GPT, "clip=0.05", "model.blocks=12"], ["placement=per_node"]),
        ([*GPT, "microbatches=3", "model.dropout=0.1"], ["placement=packed", "hosts=2"]),
        ([*GPT, "model.group=2", "precision=fp16"], ["placement=per_node"]),
    ],
    ids=["nodes", "gpt", "group"],
)
def test_hosts_apart_are_bitwise_one_process(words: list[str], placement: list[str]) -> None:
    words = [*words, "finish=0.7", "finish_sweeps=2"]
    engine = engine_for(words)
    settings = config.load([*SMALL, *words, *placement])
    job = methods.job_of(settings, data.load(settings), 6)
    plan = job.method.plan(settings, job.tree, Cluster(((16.0, 0.0),)))
    hosts = [job.method.host(job, plan, index) for index in range(len(plan.names))]
    assert len(hosts) > 1
    passes = {STEP: job.method.calls(job, plan), **job.method.other_calls(job, plan)}
    for step in range(6):
        engine.step(step, report=False)
        rehearsal.step(hosts, job, passes[job.pass_at(step)], step)
    together = {k: v for host in hosts for k, v in host.state()[0].items()}
    assert all(torch.equal(together[k], v) for k, v in engine.state()[0].items())


def test_what_sweeps_cost() -> None:
    """Two layers of a node's unit each way and sweep, and the head."""
    tree, rule = Tree(8), Rule()
    costs = [sweep_cost(tree, rule, K) for K in (1, 2, 3)]
    assert [cost.path for cost in costs] == [6, 10, 14]
    assert [cost.work for cost in costs] == [16, 24, 28]
    assert chain_cost(tree).path == 16


@pytest.mark.parametrize(
    "words",
    [["finish_sweeps=2"], ["finish_sweeps=2", "finish=0.5", "finish_path=spine-1"],
     ["finish_sweeps=2", "method=bp"], ["finish_sweeps=2", "finish=0.5"]],
)  # fmt: skip
def test_what_cannot_sweep_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="finish_sweeps=2"):
        methods.checked(config.load([*SMALL, *words]))
