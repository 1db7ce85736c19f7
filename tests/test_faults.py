"""Killed actors: the run ends with the same weights as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from treeprop_ray import config, data
from treeprop_ray.engine import local, runtime
from treeprop_ray.engine import ray as distributed
from treeprop_ray.errors import TrainingError

WORDS = ["model.blocks=4", "model.hidden=8", "batch=32", "model.activation=tanh", "alpha=1",
         "beta=0.5", "sigma=0.05", "clip=0.05", "microbatches=2", "timeline_steps=0"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    runtime.start(config.RaySettings(num_cpus=2))
    yield
    runtime.stop()


def pids() -> dict[str, int]:
    return {
        a["Name"].rpartition("/")[2]: a["Pid"]
        for a in ray._private.state.actors().values()
        if a["State"] == "ALIVE" and a["Pid"]
    }


def undisturbed(steps: int) -> Any:
    engine = local.build(config.load(WORDS), data.load(config.load([])), 100)
    for step in range(steps):
        engine.step(step, report=False)
    return engine.state()


def assert_equal(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key


@pytest.mark.parametrize(
    ("placement", "victims"),
    [
        (["placement=packed", "hosts=2"], ["host-0", "host-1"]),
        (["placement=per_node"], ["boundary", "node-2", "node-3", "node-1"]),
    ],
)
def test_kills_at_random_moments_do_not_change_the_weights(
    placement: list[str], victims: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Root, spine, inner and finest nodes, the boundary; each once, during steps and scoring."""
    words = [*WORDS, "engine=ray", *placement, "snapshot_every=4", "max_failures=50"]
    engine = distributed.build(config.load(words), data.load(config.load([])), 100)
    dice = random.Random(7)
    steps = 8 * len(victims)
    kills = {8 * i + dice.randrange(1, 8): victim for i, victim in enumerate(victims)}
    try:
        for step in range(steps):
            engine.step(step, report=False)
            if step in kills:
                time.sleep(dice.uniform(0, 0.05))  # somewhere in forward, backward or update
                os.kill(pids()[kills[step]], signal.SIGKILL)
            if step % 10 == 9:
                engine.score({"full": engine.tree.chain}, "validation")
        found = engine.state()
        assert engine.failures >= len(victims)
    finally:
        engine.close()
    assert_equal(found, undisturbed(steps))
    assert "replaying" in capfd.readouterr().err


def test_after_too_many_failures_the_run_stops() -> None:
    words = [*WORDS, "engine=ray", "placement=packed", "hosts=2", "max_failures=0"]
    engine = distributed.build(config.load(words), data.load(config.load([])), 100)
    try:
        engine.step(0, report=False)
        os.kill(pids()["host-1"], signal.SIGKILL)
        with pytest.raises(TrainingError, match="failure 1, max_failures=0"):
            for step in range(1, 20):
                engine.step(step, report=False)
    finally:
        engine.close()


def test_a_late_actor_is_named() -> None:
    words = [*WORDS, "engine=ray", "placement=packed", "hosts=2"]
    engine = distributed.build(config.load(words), data.load(config.load([])), 100)
    try:
        engine.step(0, report=False)
        engine.reports()
        engine.driver.wave_timeout = 3  # a first step on a busy machine may take longer
        stuck = pids()["host-1"]
        os.kill(stuck, signal.SIGSTOP)
        try:
            with pytest.raises(TrainingError, match=r"no answer within 3 s from .*host-1"):
                for step in range(1, 5):
                    engine.step(step, report=False)
        finally:
            os.kill(stuck, signal.SIGCONT)
    finally:
        engine.close()
