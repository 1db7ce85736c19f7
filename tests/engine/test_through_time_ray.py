"""A time tree whose depths are actors gives the local engine's numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import engine_of
from warm import warm_ray

from treeprop_ray import config, data, methods
from treeprop_ray.core.rule import cut
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Host
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.time import one_time_step

STEPS = 4
OWN = ["model.name=own_cells:gated", "model.recurrent=true"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with warm_ray():
        yield


def hosts_of(job: methods.Job) -> list[Host]:
    """The hosts of a plan with an actor per depth, in this process."""
    plan = job.method.plan(job.settings, job.tree, Cluster(((32.0, 0.0),)))
    return [job.method.host(job, plan, k) for k in range(len(plan.names))]


def test_a_depth_goes_back_before_the_next_one_goes_ahead() -> None:
    calls = [(c.phase, c.host) for c in one_time_step(3, 1)]
    assert calls[0] == ("open", 0)
    assert calls[1:4] == [("ahead", 3), ("readout", 0), ("back", 3)]
    assert [c.last for c in one_time_step(3, 1) if c.host == 0] == [False, False, False, True]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("sweeps", [0, 1, 4, 5])
@pytest.mark.parametrize(("depth", "shards"), [(4, 2), (4, 4), (3, 4)])
@pytest.mark.parametrize("cell", ["gru", "elman"])
def test_windows_of_a_depth_have_together_the_gradients_of_the_whole(
    depth: int, shards: int, sweeps: int, cell: str, pieces: int
) -> None:
    words = ["experiment=digits_gru", f"model.name={cell}", "model.hidden=5", f"time.depth={depth}",
             f"time.sweeps={sweeps}", "batch=6", "precision=float64",
             f"microbatches={pieces}"]  # fmt: skip
    if pieces == 2 and shards == 2:  # the literal readings
        words += ["time.loss=sum", "time.gradient=one"]
    if sweeps // 2 > 2 ** (depth - 1) // shards:
        with pytest.raises(UserError, match=f"time.shards={shards}"):
            config.load([*words, f"time.shards={shards}"])
        return
    settings = config.load([*words, f"time.shards={shards}"])
    samples = data.load(settings)
    local = engine_of(settings, samples, 20)
    local.gradients(0)
    hosts, batch = hosts_of(local.job), settings.batch
    held: dict[tuple[int, str], torch.Tensor | None] = {}
    for call in one_time_step(depth, pieces, shards, sweeps):
        inputs = {name: held[call.piece, name] for name in call.inputs}
        out = hosts[call.host].run(call, cut(0, batch, pieces)[call.piece], inputs)
        assert list(out) == call.outputs
        held.update({(call.piece, name): t for name, t in out.items()})
    for host in hosts:
        for name, module in host.parts.items():
            theirs = local.host.parts[name]
            for mine, other in zip(module.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)
    expected = local.host.report(0, norms=True)
    reports = [host.report(0, norms=True) for host in hosts]
    for d, terms in expected.losses.items():
        for term, value in terms.items():
            found = sum(report.losses.get(d, {}).get(term, 0.0) for report in reports)
            assert found == pytest.approx(value, rel=1e-10)
    norms = [item for report in reports for item in report.square_norms.items()]
    assert len(norms) == len(expected.square_norms)  # a cell's copies do not count twice
    assert dict(norms) == pytest.approx(expected.square_norms)


@pytest.mark.parametrize(("depth", "pieces"), [(1, 1), (3, 1), (4, 2)])
def test_the_lookahead_over_hosts_is_the_local_one(depth: int, pieces: int) -> None:
    words = ["experiment=digits_gru", "model.hidden=5", f"time.depth={depth}", "batch=6",
             "time.recipe=lookahead", "time.sweeps=0", f"microbatches={pieces}"]  # fmt: skip
    settings = config.load(words)
    samples = data.load(settings)
    local = engine_of(settings, samples, 20)
    local.gradients(0)
    hosts, batch = hosts_of(local.job), settings.batch
    calls = one_time_step(depth, pieces, lookahead=True)
    held: dict[tuple[int, str], torch.Tensor | None] = {}
    for piece in cut(0, batch, pieces):
        for call in (c for c in calls if c.piece == piece.index):
            inputs = {name: held[call.piece, name] for name in call.inputs}
            out = hosts[call.host].run(call, piece, inputs)
            assert list(out) == call.outputs
            held.update({(call.piece, name): t for name, t in out.items()})
    for host in hosts:
        for name, module in host.parts.items():
            theirs = local.host.parts[name]
            for mine, other in zip(module.parameters(), theirs.parameters(), strict=True):
                assert mine.grad is not None and other.grad is not None
                assert torch.equal(mine.grad, other.grad), name
    for index in range(len(hosts)):  # a host forgets a piece after its last call, and not before
        ends = [c.last for c in calls if c.host == index]
        assert ends.count(True) == pieces and ends[-1]


@pytest.mark.parametrize("words", [
    ["clip=0", "time.sweeps=2"],
    ["clip=0.05", "time.sweeps=2", "time.shards=2", "precision=float64"],
    ["clip=0.05", "microbatches=2", "model.name=elman", "time.depth=3", "time.recipe=lookahead",
     "time.sweeps=0"],
    [*OWN, "time.recipe=newton", "time.sweeps=1", "clip=0.05"],
    [*OWN, "time.sweeps=2", "time.shards=2", "precision=float64"],
])  # fmt: skip
def test_depths_as_actors_are_bitwise_the_local_engine(cluster: None, words: list[str]) -> None:
    words = ["experiment=digits_gru", "model.hidden=8", "time.depth=2", "batch=32", *words]
    settings = config.load(words)
    samples = data.load(settings)
    method = methods.of(settings)
    paths = method.outline(settings, method.tree(settings)).paths
    found = []
    for where in ("local", "ray"):
        made = engine_of(config.load([*words, f"engine={where}"]), samples, 20)
        try:
            losses = []
            for step in range(STEPS):
                made.step(step, report=True)
                merged: dict[int, dict[str, float]] = {}
                for report in made.reports():
                    for d, terms in report.losses.items():
                        for name, value in terms.items():
                            mine = merged.setdefault(d, {})
                            mine[name] = mine.get(name, 0.0) + value
                losses.append(merged)
            state = made.state()
            made.load(state)
            found.append((losses, state, made.score(paths, "validation")))
        finally:
            made.close()
    local, ray = found
    if settings.time.shards > 1:  # a sum of sums: equal up to rounding, here of float64
        for step in range(STEPS):
            for d, terms in local[0][step].items():
                assert ray[0][step][d] == pytest.approx(terms, rel=1e-9)
    else:
        assert local[0] == ray[0] and local[2] == ray[2]
    for mine, theirs in zip(local[1], ray[1], strict=True):
        assert mine.keys() == theirs.keys()
        for k in mine:
            if settings.time.shards > 1:
                torch.testing.assert_close(mine[k], theirs[k], rtol=1e-7, atol=1e-9)
            else:
                assert torch.equal(mine[k], theirs[k])
