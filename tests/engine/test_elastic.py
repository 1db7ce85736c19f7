"""Machines come and go: more or fewer copies, the batch cut the same way, the same weights."""

from __future__ import annotations

import pytest
import torch
from conftest import engine_of
from simulated import machines

from treeprop_ray import config, data
from treeprop_ray.config import Settings
from treeprop_ray.engine.recovery import recut

WORDS = ["model.blocks=3", "model.hidden=8", "batch=16", "data.limit=200", "timeline_steps=0"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), [(1, 1)]),
        (Settings(replicas=2), [(2, 1), (1, 2)]),
        (Settings(replicas=2, microbatches=3), [(2, 3), (1, 6)]),
        (Settings(replicas=2, microbatches=3, elastic=True), [(6, 1), (3, 2), (2, 3), (1, 6)]),
    ],
)
def test_the_same_pieces_in_other_hands(
    settings: Settings, expected: list[tuple[int, int]]
) -> None:
    assert [(s.replicas, s.microbatches) for s in recut(settings)] == expected


def test_a_cluster_grows_from_two_to_four_machines_and_falls_back_to_one() -> None:
    samples = data.load(config.load(WORDS))
    alone = engine_of(config.load([*WORDS, "microbatches=4"]), samples, 100)
    words = [*WORDS, "engine=ray", "placement=packed", "hosts=1", "cpus_per_actor=1", "replicas=2",
             "microbatches=2", "elastic=true", "snapshot_every=2"]  # fmt: skip
    copies = []
    with machines(2) as (cluster, others):
        crew = engine_of(config.load(words), samples, 100)
        step = 0

        def until(count: int) -> None:
            nonlocal step
            began = step
            while crew.plan.copies != count and step < began + 2000:
                crew.step(step, report=True)
                crew.reports()
                alone.step(step, report=True)
                step += 1
            copies.append(crew.plan.copies)

        try:
            until(2)
            others += [cluster.add_node(num_cpus=1) for _ in range(2)]
            until(4)
            for node in others:
                cluster.remove_node(node, allow_graceful=False)
            until(1)
            found = crew.state()
        finally:
            crew.close()
    assert copies == [2, 4, 1]
    for mine, theirs in zip(found, alone.state(), strict=True):
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())
