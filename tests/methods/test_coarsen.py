"""coarsen: along a run the finest levels of the tree go, until the whole chain is one block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import StopAt, Stopped
from test_finish import GPT, SMALL, after, engine_for
from torch import Tensor
from torch.nn import functional as F

from treeprop_ray import config, data, methods
from treeprop_ray.benchmarks import rehearsal
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError
from treeprop_ray.run.trainer import Trainer
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.cost import chain_cost, tree_cost
from treeprop_ray.schedule.ops import STEP
from treeprop_ray.schedule.probe import FINISH


@pytest.mark.parametrize(
    "words",
    [
        ["clip=0.05", "microbatches=3"],
        ["recompute=true", "precision=bf16"],
        ["chain_lr=3", "optimizer=sgd", "weights.ce=2", "lr=0.125", "weight_decay=0", "clip=0"],
        ["freeze=[0..2]"],
        GPT,
    ],
    ids=["clip", "recompute", "weighted", "freeze", "gpt"],
)
def test_without_levels_it_is_backpropagation(words: list[str]) -> None:
    """Bit for bit, with the optimizer's state (which a weight on the loss makes larger)."""
    plain = [w.replace("lr=0.125", "lr=0.25") for w in words if not w.startswith("weights.ce")]
    expected, found = after([*plain, "method=bp"]), after([*words, "coarsen=[0,0]"])
    assert all(torch.equal(found[0][key], value) for key, value in expected[0].items())
    if plain == words:
        assert all(torch.equal(found[1][key], value) for key, value in expected[1].items())
    assert found[1].keys() == expected[1].keys()  # auxiliary blocks have no gradients at all


@pytest.mark.parametrize("words", [[], ["objective=node_all_ce"], GPT], ids=["node", "all", "gpt"])
def test_without_its_finest_level_it_is_a_tree_of_coarser_blocks(words: list[str]) -> None:
    """Bit for bit: pairs of fine blocks are one block, the level above keeps its auxiliary one."""
    words = [*words, "sigma=0", "weights.right=2", "clip=0"]
    expected, found = after([*words, "model.group=2"])[0], after([*words, "coarsen=[0]"])[0]
    ours = {"0-1": "0-1 1-2", "1-2": "2-3 3-4", "2-3": "4-5 5-6 6-7", "0-2": "0-4"}
    compared = 0
    for key, value in expected.items():
        part, name = key.split("/")
        layer, _, rest = name.partition(".")
        if part in ours:
            assert layer in ours[part].split()
            mine = found[f"{layer}/{rest}"]
        else:
            mine = found[key.replace("3-4/", "7-8/")]
        assert torch.equal(mine, value), key
        compared += 1
    assert compared == len(expected)


def objective(engine: Any, level: int) -> Tensor:
    """The stage's objective in one graph, straight from what it says of segments."""
    tree, rule, host = engine.tree, engine.job.rule, engine.host
    x, y = engine.job.batches()(0)

    def run(edge: Edge, z: Tensor) -> Tensor:
        out: Tensor = host.parts[edge_name(edge)](z)
        return out

    z = {0: run(STEM, x)}
    total = torch.zeros((), dtype=torch.float64)

    def reads(i: int) -> Tensor:
        return z[i].detach() if rule.detach_levels and i else z[i]

    for s in range(1, level + 1):
        for node in tree.level(s):
            spine, cut = tree.is_spine(node), s == level and not node.is_leaf
            mu = reads(node.l)
            if cut:
                for i in range(node.l, min(node.r, tree.N - 1)):
                    mu = run((i, i + 1), mu)
            else:
                z[node.n] = mu = run(node.left, mu)
            if spine:
                weight = rule.ce if cut else rule.ce_weight(tree, node)
                total = total + weight * F.cross_entropy(run(tree.head, mu), y)
            else:
                hat = mu if cut else run(node.right, mu)
                target = reads(node.r) if rule.target_gradient else z[node.r].detach()
                total = total + rule.right * (hat - target).square().mean()
    return total


@pytest.mark.parametrize("blocks", [3, 4, 5, 7, 9, 12])
@pytest.mark.parametrize("words", [[], ["target_gradient=false"], ["detach_levels=true"]])
@pytest.mark.parametrize("split", ["floor", "right_full"])
def test_gradients_are_those_of_the_whole_objective(
    blocks: int, words: list[str], split: str
) -> None:
    words = [*words, f"model.blocks={blocks}", f"split={split}", "objective=node_all_ce",
             "precision=float64", "weights.right=3", "weights.ce=0.5", "sigma=0"]  # fmt: skip
    depth = Tree(blocks + 1).depth
    for k in range(1, depth):
        engine = engine_for([*words, f"coarsen={[0.0] * k}"])
        level = depth - k
        named = {
            f"{part}/{key}": p
            for part, module in engine.host.parts.items()
            for key, p in module.named_parameters()
        }
        grads = torch.autograd.grad(objective(engine, level), named.values(), allow_unused=True)
        engine.gradients(0)
        engine.host.catch_up()
        for (key, p), grad in zip(named.items(), grads, strict=True):
            if grad is None:
                assert p.grad is None, key
            else:
                assert p.grad is not None and torch.allclose(p.grad, grad, atol=1e-14), key


@pytest.mark.parametrize(
    ("words", "placement"),
    [
        (["clip=0.05", "microbatches=3", "sigma=0.05"], ["placement=per_node"]),
        (["model.blocks=12", "objective=node_all_ce", "precision=fp16"], ["hosts=3"]),
        ([*GPT, "microbatches=3", "objective=node_all_ce"], ["hosts=2"]),
        ([*GPT, "microbatches=3", "objective=node_all_ce"], ["placement=per_node"]),
    ],
    ids=["nodes", "scaled", "gpt", "gpt_nodes"],
)
def test_hosts_apart_are_bitwise_one_process(words: list[str], placement: list[str]) -> None:
    """The hosts of several actors, with tensors handed from one to the other, through all stages"""
    words = [*words, "coarsen=[0.3,0.6]", "finish=0.1"]
    engine = engine_for(words)
    kind = [] if "placement=per_node" in placement else ["placement=packed"]
    settings = config.load([*SMALL, *words, *placement, *kind])
    job = methods.job_of(settings, data.load(settings), 6)
    plan = job.method.plan(settings, job.tree, Cluster(((16.0, 0.0),)))
    hosts = [job.method.host(job, plan, index) for index in range(len(plan.names))]
    assert len(hosts) > 1
    passes = {STEP: job.method.calls(job, plan), **job.method.other_calls(job, plan)}
    for step in range(6):
        engine.step(step, report=False)
        rehearsal.step(hosts, job, passes[job.pass_at(step)], step)
    for mine, theirs in zip(
        zip(*(h.state() for h in hosts), strict=True), engine.state(), strict=True
    ):
        together = {key: value for part in mine for key, value in part.items()}
        assert together.keys() == theirs.keys()
        assert all(torch.equal(together[key], value) for key, value in theirs.items())


def test_which_steps_are_which() -> None:
    engine = engine_for(["coarsen=[0.25,0.5]", "finish=0.25", "objective=node"], 8)
    passes = [engine.job.pass_at(step) for step in range(8)]
    assert passes == [STEP] * 2 + ["level 2"] * 2 + ["level 1"] * 2 + [FINISH] * 2
    assert engine.method.stages(engine.job) == {
        STEP: {"steps": 2, "block_applications_per_step": 12},
        "level 2": {"steps": 2, "block_applications_per_step": 9},
        "level 1": {"steps": 2, "block_applications_per_step": 8},
        FINISH: {"steps": 2, "block_applications_per_step": 8},
    }
    cost = engine.method.cost(engine.job.settings, engine.tree)
    assert (cost.work, cost.path) == (0.25 * (24 + 18 + 16 + 16), 0.25 * (8 + 10 + 16 + 16))


def test_what_a_stage_costs() -> None:
    """That of the tree with as coarse blocks; at the end that of the chain."""
    tree, rule = Tree(8), Rule(objective="node")
    fine, coarse, chain = (tree_cost(tree, rule, level) for level in (0, 2, 1))
    assert [(c.work, c.path) for c in (fine, coarse, chain)] == [(24, 8), (18, 10), (16, 16)]
    assert chain.path == chain_cost(tree).path


@pytest.mark.parametrize("stop", [3, 5, 8])
def test_a_run_is_taken_up_in_any_stage(tmp_path: Path, stop: int) -> None:
    words = [*SMALL, "steps=9", "coarsen=[0.4,0.7]", "objective=node", "checkpoint_every=2",
             "schedule=cosine", f"out={tmp_path}"]  # fmt: skip
    expected = Trainer.of(config.load([*words, "name=whole"]))
    expected.train()
    settings = config.load([*words, "name=parts"])
    with pytest.raises(Stopped):
        Trainer.of(settings, callbacks=[StopAt(stop)]).train()
    again = Trainer.of(settings)
    again.train()
    assert again.start > 0
    assert all(torch.equal(again.weights[k], v) for k, v in expected.weights.items())
    with pytest.raises(UserError, match="steps"):  # another number would move the stages
        Trainer.of(config.load([*words, "name=parts", "steps=12"])).train()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=bp", "coarsen=[0.5]"], "coarsen"),
        (["experiment=digits_gru", "coarsen=[0.5]"], "coarsen"),
        (["coarsen=[0.5,0.2]"], "rising order"),
        (["coarsen=[0.5,0.9]", "finish=0.2"], "1 - finish = 0.8"),
        (["coarsen=[0.1,0.2,0.3]"], "3 levels can lose 2"),
        (["coarsen=[0.5]", "patience=2"], "patience=2"),
        (["coarsen=[0.5]", "objective=final_ce"], "final_ce"),
        (["coarsen=[0.5]", "beta=0.5"], "beta"),
        (["coarsen=[0.5]", "replicas=2"], "replicas=2"),
    ],
)
def test_what_has_no_stages_is_refused(words: list[str], said: str) -> None:
    tanh = [] if "experiment=digits_gru" in words else [w for w in SMALL if "hidden" not in w]
    with pytest.raises(UserError, match=said):
        methods.checked(config.load([*tanh, *words]))
