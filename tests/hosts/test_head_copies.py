"""head_copies=: copies of the head change no bit, wherever they are and however a batch is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from in_process import InProcess
from torch import nn

from treeprop_ray import config, data
from treeprop_ray.benchmarks.rehearsal import step
from treeprop_ray.core.head_sums import HeadSums, as_bytes, from_bytes
from treeprop_ray.engine import LocalEngine
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.head import HeadCopy
from treeprop_ray.methods import job_of
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.ops import STEP
from treeprop_ray.schedule.placement import copies_for

MLP = ["model.blocks=12", "model.hidden=8", "batch=24", "model.activation=tanh", "sigma=0.05"]
GPT = ["experiment=text_small", "model.blocks=7", "model.output_block=true", "model.hidden=8",
       "model.heads=2", "data.length=8", "data.limit=64", "batch=6", "split=right_full",
       "model.dropout=0.1"]  # fmt: skip
CASES = {
    "mlp": [*MLP, "objective=node_all_ce", "head_copies=1"],
    "pieces": [*MLP, "objective=node_all_ce", "head_copies=2", "microbatches=5", "clip=0.1"],
    "beta": [*MLP, "objective=node", "beta=0.5", "head_copies=3", "microbatches=2"],
    "vjp": [*MLP, "objective=node_all_ce", "beta=0.5", "correction=vjp", "head_copies=2"],
    "tied": [*GPT, "objective=node_all_ce", "head_copies=2", "microbatches=3", "clip=0.5"],
    "finish": [*GPT, "objective=node_all_ce", "head_copies=2", "microbatches=2", "finish=0.9"],
    "frozen": [*GPT, "objective=node_all_ce", "head_copies=1", "freeze=[head]"],
}


@pytest.mark.parametrize("where", ["placement=per_node", "placement=packed hosts=2"])
@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_copies_of_the_head_are_bitwise_the_local_engine(words: list[str], where: str) -> None:
    settings = config.load([*words, "engine=ray", *where.split()])
    samples = data.load(settings)
    alone = replace(settings, engine="local", head_copies=0)
    oracle = LocalEngine(job_of(alone, samples, 20))
    job = job_of(settings, samples, 20)
    plan = job.method.plan(settings, job.tree, Cluster(((64.0, 0.0),)))
    hosts = [job.method.host(job, plan, index) for index in range(len(plan.names))]
    assert sum(isinstance(host, HeadCopy) for host in hosts) == settings.head_copies
    calls = job.method.calls(job, plan)
    assert len({c.host for c in calls if c.phase == "head"}) >= settings.head_copies
    passes = {STEP: calls, **job.method.other_calls(job, plan)}
    for number in range(3):
        oracle.step(number, report=False)
        step(hosts, job, passes[job.pass_at(number)], number)
    for kind in (0, 1):
        theirs = {k: v for host in hosts for k, v in host.state()[kind].items()}
        mine = oracle.state()[kind]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(theirs[key], value) for key, value in mine.items())


def test_a_probe_is_the_local_ones_with_copies_of_a_head_that_has_dropout() -> None:
    """All are in evaluation mode while it measures, and in training after it."""
    settings = config.load([*CASES["tied"], "engine=ray", "placement=per_node"])
    samples = data.load(settings)
    oracle = LocalEngine(job_of(replace(settings, engine="local", head_copies=0), samples, 20))
    engine = InProcess(job_of(settings, samples, 20))
    for some in (oracle, engine):
        some.step(0, report=False)
    assert oracle.probe(1, 1) == pytest.approx(engine.probe(1, 1), rel=1e-12, nan_ok=True)
    for some in (oracle, engine):
        some.step(1, report=False)
    (weights, _), (others, _) = oracle.state(), engine.state()
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def test_gradients_are_added_in_their_order_whatever_comes_first() -> None:
    p = nn.Parameter(torch.zeros(1))
    ledger = HeadSums([p], [(1, 0), (2, 0), (4, 0)])
    big, small = torch.tensor([1e8]), torch.tensor([1.0])
    for _ in range(2):  # steps
        ledger.put((4, 0), [-big])
        ledger.put((2, 0), [small])
        assert p.grad is None
        ledger.put((1, 0), [big.clone()])
        assert p.grad is not None and float(p.grad) == 0.0  # 1e8 + 1 is 1e8
        p.grad = None
    ledger.put((2, 0), [small])
    ledger.clear()
    ledger.put((1, 0), [None])
    assert p.grad is None
    _, apart = ledger.apart(lambda: (3 * p).sum().backward())
    assert p.grad is None and float(apart[0] or 0) == 3.0


def test_tensors_of_several_kinds_travel_as_bytes() -> None:
    like = [torch.randn(3, 2), torch.ones(2), torch.arange(5), torch.ones((), dtype=torch.bfloat16)]
    sent = [like[0], None, *like[2:]]
    for a, b in zip(from_bytes(as_bytes(sent), like), sent, strict=True):
        same = a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)
        assert same or (a is None and b is None)
    assert from_bytes(as_bytes([]), []) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["head_copies=1"], "head_copies=1: is for method=tree"),
        (["head_copies=1", "engine=ray", "method=bp"], "head_copies=1: is for method=tree"),
        (["head_copies=1", "engine=ray", "compile=true"], "head_copies=1: needs compile=false"),
    ],
)
def test_where_there_can_be_no_copies(words: list[str], text: str) -> None:
    settings = config.load([*MLP, *words])
    with pytest.raises(UserError, match=text):
        job_of(settings, data.load(settings), 20).method.check(settings)


def test_boundary_and_copies_take_turns_from_the_finest_level_on() -> None:
    assert copies_for(0, [8, 12, 14, 15], 5) == {}
    assert copies_for(1, [8, 12, 14, 15], 5) == {14: 5, 8: 5}
    assert copies_for(3, [8, 12, 14, 15], 5) == {14: 5, 12: 6, 8: 7}


def test_more_copies_than_questions_are_refused() -> None:
    settings = config.load([*MLP, "engine=ray", "head_copies=1", "objective=node", "beta=0"])
    job = job_of(settings, data.load(settings), 20)
    with pytest.raises(UserError, match="head_copies=1: the head is asked 1 times in a step"):
        job.method.plan(settings, job.tree, Cluster(((64.0, 0.0),)))
