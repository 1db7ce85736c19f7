"""A time tree whose depths are actors gives the local engine's numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from treeprop_ray import config, data
from treeprop_ray.outline import over_time
from treeprop_ray.through_time import engine
from treeprop_ray.through_time.distributed import one_time_step

STEPS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    from treeprop_ray.engine import runtime

    runtime.start(config.RaySettings(num_cpus=2))
    yield
    runtime.stop()


def test_a_depth_goes_back_before_the_next_one_goes_ahead() -> None:
    calls = [(c.phase, c.host) for c in one_time_step(3, 1)]
    assert calls[0] == ("open", 0)
    assert calls[1:4] == [("ahead", 3), ("readout", 0), ("back", 3)]
    assert [c.last for c in one_time_step(3, 1) if c.host == 0] == [False, False, False, True]


@pytest.mark.parametrize("words", [
    ["clip=0", "time.sweeps=2"], ["clip=0.05", "microbatches=2", "model.name=elman"],
])  # fmt: skip
def test_depths_as_actors_are_bitwise_the_local_engine(cluster: None, words: list[str]) -> None:
    words = ["experiment=digits_gru", "model.hidden=8", "time.depth=2", "batch=32", *words]
    settings = config.load(words)
    samples = data.load(settings)
    paths = over_time(settings).paths
    found = []
    for where in ("local", "ray"):
        made = engine.build(config.load([*words, f"engine={where}"]), samples, 20)
        try:
            losses = []
            for step in range(STEPS):
                made.step(step, report=True)
                merged: dict[int, dict[str, float]] = {}
                for report in made.reports():
                    for d, terms in report.losses.items():
                        merged.setdefault(d, {}).update(terms)
                losses.append(merged)
            state = made.state()
            made.load(state)
            found.append((losses, state, made.score(paths, "validation")))
        finally:
            made.close()
    local, ray = found
    assert local[0] == ray[0] and local[2] == ray[2]
    for mine, theirs in zip(local[1], ray[1], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)
