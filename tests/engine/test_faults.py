"""Lost actors and machines: the run ends with the same weights as if nothing had happened."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ray
import torch
from conftest import engine_of
from ray import cloudpickle
from ray._private.internal_api import node_stats
from simulated import machines

from treeprop_ray import config, data
from treeprop_ray.engine import crew, runtime
from treeprop_ray.errors import TrainingError
from treeprop_ray.methods.tree import TreeProp
from treeprop_ray.run import checkpoint
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.storage import Disk
from treeprop_ray.run.trainer import Trainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import the tests

WORDS = ["model.blocks=5", "model.hidden=8", "batch=32", "model.activation=tanh", "alpha=1",
         "beta=0.5", "sigma=0.05", "clip=0.05", "microbatches=2", "timeline_steps=0"]  # fmt: skip


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    runtime.start(config.RaySettings(num_cpus=2))
    yield
    runtime.stop()


def pids() -> dict[str, int]:
    return {
        a["Name"].rpartition("/")[2]: a["Pid"]
        for a in ray._private.state.actors().values()
        if a["State"] == "ALIVE" and a["Pid"]
    }


def assert_equal(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key


# -- kill -9 in every phase -----------------------------------------------------------------------


@dataclass(frozen=True)
class Blow:
    """At the first chance from `step` on, the leader dies in `phase` and takes others with it."""

    step: int
    phase: str
    leader: str
    others: tuple[str, ...]


def strike(folder: Path, index: int, blow: Blow) -> None:
    """Once: kill -9 the others, wherever they are, and the leader, which is where it should be."""
    try:
        (folder / f"blow-{index}").touch(exist_ok=False)
    except FileExistsError:
        return
    for name in (*blow.others, blow.leader):
        os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGKILL)


def mortal_host(folder: Path, blows: Sequence[Blow], job: Any, plan: Any, index: int) -> Any:
    """The host of an actor, with the moments of its death built in."""
    host: Any = TreeProp().host(job, plan, index)
    name = plan.names[index].rpartition("/")[2]
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    run, apply, state, last = host.run, host.apply, host.state, [-1]

    def die(phase: str, step: int) -> None:
        for k, blow in enumerate(blows):
            if blow.phase == phase and blow.leader == name and step >= blow.step:
                strike(folder, k, blow)

    def mortal_run(call: Any, piece: Any, inputs: Any) -> Any:
        if piece.index == 1:  # while the first piece of the batch is under way
            die("forward", piece.step)
        out = run(call, piece, inputs)
        if call.last:  # the backward pass is done here, and nobody has heard of it
            die("backward", piece.step)
        return out

    def mortal_apply(step: int, norms: Any) -> None:
        apply(step, norms)  # own weights are new; others may have the old ones
        last[0] = step
        die("optimizer", step)

    def mortal_state() -> Any:
        die("handing over its state", last[0])
        return state()

    host.run, host.apply, host.state = mortal_run, mortal_apply, mortal_state
    return host


class Mortal(TreeProp):
    """TreeProp whose hosts die."""

    def __init__(self, folder: Path, blows: Sequence[Blow]) -> None:
        self.folder, self.blows = folder, blows

    def host(self, job: Any, plan: Any, index: int) -> Any:
        return mortal_host(self.folder, self.blows, job, plan, index)


def blows_for(dice: random.Random, names: list[str], counts: dict[str, int]) -> list[Blow]:
    """So many kills in each phase; every name dies about equally often."""
    deck: list[str] = []
    found = []
    for k, (phase, count) in enumerate(counts.items()):
        victims: list[str] = []
        while len(victims) < count:
            if not deck:
                deck = dice.sample(names, len(names))
            victim = next((n for n in deck if n not in victims), None)
            if victim is None:
                deck = deck + dice.sample(names, len(names))
                continue
            deck.remove(victim)
            victims.append(victim)
        found.append(Blow(5 * k + dice.randrange(1, 5), phase, victims[0], tuple(victims[1:])))
    return found


class DeadlyDisk(Disk):
    """Actors die while a checkpoint is being written."""

    def __init__(self, root: Path, folder: Path, blows: Sequence[Blow]) -> None:
        super().__init__(root)
        self.folder, self.blows = folder, blows

    def begin(self, name: str) -> str:
        for k, blow in enumerate(self.blows):
            if blow.phase == "checkpoint" and int(name[5:]) >= blow.step:
                strike(self.folder, k, blow)
        return super().begin(name)


KINDS = ["boundary", "node-3", "node-4", "node-5", "node-1", "node-2"]  # N = 6: 3-4-5 is the spine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "names", "counts"),
    [
        (
            ["placement=per_node"],
            KINDS,
            {"forward": 2, "backward": 1, "optimizer": 1, "handing over its state": 1,
             "checkpoint": 1},
        ),
        pytest.param(
            ["placement=packed", "hosts=2"],
            ["host-0", "host-1"],
            {"forward": 2, "backward": 1, "optimizer": 1, "handing over its state": 1,
             "checkpoint": 1},
            marks=pytest.mark.long,
        ),
    ],
    ids=["per_node", "packed"],
)  # fmt: skip
def test_kills_in_every_phase_do_not_change_the_weights(
    local_ray: None,
    placement: list[str],
    names: list[str],
    counts: dict[str, int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each actor of a node dies once (boundary, spine, inner, finest), packed ones three times.
    A new actor costs seconds: `bench faults` and the laboratory kill more of them."""
    blows = blows_for(random.Random(7), names, counts)
    words = [*WORDS, "steps=30", "checkpoint_every=4", "log_every=5", "keep_last=1", "name=r",
             "keep_best=false"]  # fmt: skip
    ray_words = [*words, "engine=ray", *placement, "snapshot_every=4", "max_failures=50"]
    trainer = Trainer.of(config.load([*ray_words, f"out={tmp_path / 'ray'}"]))
    trainer.job = replace(trainer.job, method=Mortal(tmp_path, blows))
    assert trainer.folder is not None
    trainer.folder.storage = DeadlyDisk(tmp_path / "ray/r/checkpoints", tmp_path, blows)
    trainer.train()
    assert len(list(tmp_path.glob("blow-*"))) == len(blows)
    assert {n for b in blows for n in (b.leader, *b.others)} == set(names)
    # a blow that falls while the steps are done again belongs to the same episode
    assert 1 <= trainer.engine.recovery.failures <= len(blows)
    told = capfd.readouterr().err
    assert all(f"r/{blow.leader}" in told for blow in blows) and told.count("replaying") >= len(
        blows
    )

    Trainer.of(config.load([*words, f"out={tmp_path / 'local'}"])).train()
    found, expected = (checkpoint.load(tmp_path / e / "r" / "checkpoints", 30) for e in
                       ("ray", "local"))  # fmt: skip
    assert_equal((found.weights, found.optimizer), (expected.weights, expected.optimizer))
    a, b = (pd.read_csv(tmp_path / e / "r" / "metrics.csv") for e in ("ray", "local"))
    assert (a["data_share"].dropna() >= 0).all()
    timing = ["step_seconds", "data_share"]
    pd.testing.assert_frame_equal(a.drop(columns=timing), b.drop(columns=timing))


def test_depths_of_a_time_tree_recover_too(local_ray: None) -> None:
    words = ["experiment=digits_gru", "model.hidden=8", "time.depth=2", "batch=32", "clip=0.05",
             "microbatches=2", "snapshot_every=3"]  # fmt: skip
    samples = data.load(config.load(words))
    expected = engine_of(config.load(words), samples, 20)
    engine: Any = engine_of(config.load([*words, "engine=ray"]), samples, 20)
    try:
        for step in range(10):
            engine.step(step, report=False)
            expected.step(step, report=False)
            if step == 6:
                os.kill(pids()["depth-1"], signal.SIGKILL)
                os.kill(pids()["boundary"], signal.SIGKILL)
        found = engine.state()
        assert engine.recovery.failures >= 1 and engine.recovery.point[0] > 0
    finally:
        engine.close()
    assert_equal(found, expected.state())


def test_after_too_many_failures_the_run_stops_and_names_the_checkpoint(
    local_ray: None, tmp_path: Path
) -> None:
    class Strike(Callback):
        def on_step(self, run: Trainer, done: int) -> None:
            if done == 5:
                run.keeper.settle(wait=True)  # the checkpoint of step 4 is written meanwhile
                os.kill(pids()["host-1"], signal.SIGKILL)

    words = [*WORDS, "engine=ray", "placement=packed", "hosts=2", "max_failures=0", "steps=20",
             "checkpoint_every=4", "name=r", f"out={tmp_path}"]  # fmt: skip
    with pytest.raises(TrainingError) as caught:
        Trainer.of(config.load(words), callbacks=[Strike()]).train()
    text = str(caught.value)
    assert "\n" not in text and "lost r/host-1" in text and "failure 1, max_failures=0" in text
    assert f"last checkpoint: {tmp_path / 'r' / 'checkpoints' / 'step-00000004'}" in text


def test_a_paused_actor_is_replaced(
    local_ray: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not dead, so Ray says nothing: only the time that a wave may take tells."""
    monkeypatch.setattr(crew, "ANSWER_SECONDS", 5)
    samples = data.load(config.load([]))
    alone = engine_of(config.load(WORDS), samples, 100)
    words = [*WORDS, "engine=ray", "placement=packed", "hosts=2", "max_failures=99"]
    engine = engine_of(config.load(words), samples, 100)
    try:
        for step in range(6):
            alone.step(step, report=False)
            engine.step(step, report=False)
            if step == 1:
                engine.reports()
                # not before: a first step on a busy machine may take longer
                engine.driver.crew.wave_timeout = 15
                stuck = pids()["host-1"]
                os.kill(stuck, signal.SIGSTOP)
        found = engine.state()
        assert pids()["host-1"] != stuck
    finally:
        engine.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(stuck, signal.SIGKILL)
    assert_equal(found, alone.state())
    told = capfd.readouterr().err
    assert "host-1" in told and "no answer within 15 s from" in told


# -- no leak --------------------------------------------------------------------------------------


def memory(engine: Any) -> dict[str, float]:
    """MB of the driver and of each actor (private pages), and of the object store."""
    engine.reports()
    found = {}
    for name, pid in {**pids(), "driver": os.getpid()}.items():
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        found[name] = (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 1e6
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats
    return {**found, "object store": stats.object_store_bytes_used / 1e6}


def test_memory_does_not_grow_with_the_steps(local_ray: None) -> None:
    """Packets are 131 kB here, so they lie in shared memory; one leaked per step would be 26 MB in
    every round. What an allocator keeps for later may grow in one round, and not in all."""
    words = ["model.blocks=3", "model.hidden=64", "batch=512", "engine=ray", "placement=packed",
             "hosts=2", "snapshot_every=10"]  # fmt: skip
    engine, rounds = engine_of(config.load(words), data.load(config.load([])), 900), 4
    growth: dict[str, float] = {}
    try:
        for step in range(100):
            engine.step(step, report=False)
        used = memory(engine)
        for first in range(100, 100 + 200 * rounds, 200):
            for step in range(first, first + 200):
                engine.step(step, report=step % 50 == 0)
            before, used = used, memory(engine)
            growth = {k: min(growth.get(k, math.inf), used[k] - before[k]) for k in before}
            if max(growth.values()) < 10:
                break
        assert engine.recovery.point[0] >= step - 20 and len(engine.recovery.journal) <= 20
    finally:
        engine.close()
    assert growth.keys() >= {"host-0", "host-1", "driver", "object store"}
    assert max(growth.values()) < 10, growth


# -- a whole machine ------------------------------------------------------------------------------


@pytest.mark.long
def test_a_machine_of_three_is_lost_and_the_run_goes_on_with_two(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Three actors, strictly on three machines: what was asked for no longer fits two."""
    words = [*WORDS, "engine=ray", "placement=packed", "hosts=3", "strategy=STRICT_SPREAD",
             "cpus_per_actor=1", "snapshot_every=4"]  # fmt: skip
    samples = data.load(config.load([]))
    alone = engine_of(config.load(WORDS), samples, 100)
    runtime.stop()  # the one that this module's other tests share
    with machines(3) as (cluster, others):
        engine = engine_of(config.load(words), samples, 100)
        try:
            step = 0
            # workers die a bit later than their machine
            while step < 14 or (not engine.recovery.failures and step < 2000):
                engine.step(step, report=False)
                alone.step(step, report=False)
                if step == 8:
                    cluster.remove_node(others[0], allow_graceful=False)
                step += 1
            found = engine.state()
            assert len(engine.plan.names) == 2 and engine.recovery.failures >= 1
            # it did not begin anew: the point outlived the machine
            assert engine.recovery.point[0] >= 4
        finally:
            engine.close()
    assert_equal(found, alone.state())
    told = capfd.readouterr().err
    assert "lost " in told and "continuing on 2 actors" in told
