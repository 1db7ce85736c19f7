"""Two machines that cannot reach each other: the run goes on without one of them."""

from __future__ import annotations

import pytest
import ray
import torch
from conftest import engine_of
from simulated import machines

from treeprop_ray import config, data
from treeprop_ray.engine import network
from treeprop_ray.engine.crew import ActorLate

# states and packets of more than 100 kB, which are fetched from machine to machine
WORDS = ["model.blocks=3", "model.hidden=128", "batch=256", "timeline_steps=0"]


@pytest.mark.parametrize("transport", [pytest.param("store", marks=pytest.mark.long), "stream"])
def test_the_run_goes_on_without_one_of_two_that_cannot_reach_each_other(
    transport: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Here nobody is cut off: the look at the network says so, and one wait is too long."""
    words = [*WORDS, "engine=ray", "placement=packed", "hosts=3", "strategy=STRICT_SPREAD",
             "cpus_per_actor=1", "snapshot_every=4", f"transport={transport}"]  # fmt: skip
    samples = data.load(config.load([]))
    alone = engine_of(config.load(WORDS), samples, 100)
    waits = iter([ActorLate("no answer within 20 s from host-1")])

    with machines(3) as (_, others):
        ids = [node.node_id for node in others]
        monkeypatch.setattr(network, "cut_pairs", lambda machines: {frozenset(ids)})

        def wait() -> None:
            engine.driver.wait()
            for late in waits:
                raise late

        engine = engine_of(config.load(words), samples, 100)
        try:
            for step in range(30):
                engine.step(step, report=False)
                alone.step(step, report=False)
                if step == 25:
                    engine.recovery.guarded(wait)
            found = engine.state()
            where = {n["NodeID"] for n in ray.nodes() if n["Alive"]} - engine.avoid
            places = set(ray.get([actor.machine.remote() for actor in engine.driver.actors]))
            assert engine.recovery.point[0] >= 4  # it did not begin anew
        finally:
            engine.close()
    assert engine.avoid == {min(ids)} and places <= where and len(places) == 2
    for mine, theirs in zip(found, alone.state(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    told = capfd.readouterr().err
    assert "cannot reach each other; going on without" in told
    assert "continuing on 2 actors" in told
