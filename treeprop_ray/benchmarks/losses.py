"""bench losses: seeded losses of actors and machines in runs with copies (replicas=2).

Between losses the run trains a few steps; after each one the state is compared, bit for bit, with
that of one process which nobody disturbs. Actors are killed at a random moment of a step, while
others already recover, and while a checkpoint is written, which must then be that of its step;
machines are simulated by Ray.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from treeprop_ray import config, data
from treeprop_ray.benchmarks.faults import WORDS, equal, on_actors, pid_of
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.engine import Engine, RayEngine, build, runtime
from treeprop_ray.errors import UserError
from treeprop_ray.methods import job_of
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.run import checkpoint, shards
from treeprop_ray.run.storage import Disk

COPIES = ["replicas=2", "placement=packed", "max_failures=1000"]
BETWEEN = 4  # steps before a loss and after it
STEPS = 10**4  # that the run would have
META = {"epoch": 0, "split": "floor", "best": {}, "wall_seconds": 0.0}
Kill = Callable[[], None]


@dataclass
class Disturbed:
    """A run with copies, beside the same run in one process."""

    crew: RayEngine
    dice: random.Random
    step: int = 0
    pace: float = 0.1  # seconds of a step
    losses: int = 0
    equal: bool = True
    alone: Engine = field(default_factory=lambda: undisturbed())
    alone_at: int = 0

    def train(self, steps: int) -> None:
        """Submit some steps."""
        for _ in range(steps):
            self.crew.step(self.step, report=False)
            self.step += 1

    def compare(self) -> None:
        """Whether the state is still that of one process."""
        state = self.crew.state()
        for step in range(self.alone_at, self.step):
            self.alone.step(step, report=False)
        self.alone_at = self.step
        self.equal &= equal(state, self.alone.state())

    def lose(self, kill: Kill, count: int = 1) -> None:
        """Train, have somebody killed in the midst of it, train on."""
        began = time.perf_counter()
        self.train(BETWEEN)
        self.crew.reports()
        self.pace = (time.perf_counter() - began) / BETWEEN
        self.train(2)
        time.sleep(self.dice.uniform(0, self.pace))
        kill()
        self.train(BETWEEN)
        self.compare()
        self.losses += count

    def pids(self) -> list[int]:
        """The processes of all actors, in random order."""
        found = [pid_of(self.crew, k) for k in range(len(self.crew.driver.actors))]
        return self.dice.sample(found, len(found))

    def row(self, name: str) -> dict[str, Any]:
        """Of the table."""
        recovery = self.crew.recovery
        return {
            "lost": name,
            "losses": self.losses,
            "recoveries": recovery.failures,
            "steps": self.step,
            "steps repeated": recovery.replayed,
            "most in a recovery": max(recovery.replays),
            "weights equal": str(self.equal).lower(),
        }


def undisturbed() -> Engine:
    """The same run in this process: as many micro-batches as there are copies."""
    torch.set_num_threads(1)
    settings = config.load([*WORDS, "microbatches=2"])
    return build(job_of(settings, data.load(settings), STEPS))


def actors_lost(run: Disturbed, losses: int) -> None:
    """One actor at a time."""
    for _ in range(losses):
        victim = run.pids()[0]
        run.lose(lambda victim=victim: os.kill(victim, signal.SIGKILL))  # type: ignore[misc]


def lost_in_recovery(run: Disturbed, losses: int) -> None:
    """Two actors, the second while the run recovers from the loss of the first."""
    for _ in range(losses // 2):
        first, second = run.pids()[:2]
        before, wait = run.crew.recovery.failures, run.dice.uniform(0, 2)

        def later(before: int = before, second: int = second, wait: float = wait) -> None:
            while run.crew.recovery.failures == before:
                time.sleep(0.01)
            time.sleep(wait)
            os.kill(second, signal.SIGKILL)

        thread = threading.Thread(target=later)

        def kill(first: int = first, thread: threading.Thread = thread) -> None:
            thread.start()
            os.kill(first, signal.SIGKILL)

        run.lose(kill, count=2)
        thread.join()


def lost_in_checkpoint(run: Disturbed, losses: int) -> None:
    """An actor while the parts of a checkpoint are written; the checkpoint must be right."""
    for _ in range(losses):
        victim = run.pids()[0]
        run.compare()
        done, expected = run.step, run.alone.state()
        with tempfile.TemporaryDirectory(prefix="treeprop-") as folder:
            meta = {"step": done, "N": run.crew.tree.N, **META}
            saving = shards.Saving(run.crew, Disk(Path(folder)), meta, {})
            time.sleep(run.dice.uniform(0, 0.02))
            os.kill(victim, signal.SIGKILL)
            run.train(BETWEEN)
            saving.arrived(wait=True)
            saving.commit()
            point = checkpoint.load(Path(folder), done)
            run.equal &= equal((dict(point.weights), dict(point.optimizer)), expected)
        run.compare()
        run.losses += 1


def machines_lost(run: Disturbed, losses: int, cluster: Cluster) -> None:
    """A simulated machine with an actor; another one joins before."""
    for _ in range(losses):
        joined = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        used = ray.get([actor.machine.remote() for actor in run.crew.driver.actors])
        nodes = [n for n in cluster.list_all_nodes() if n.node_id in used and n is not joined]
        victim = run.dice.choice(nodes)
        run.lose(lambda victim=victim: cluster.remove_node(victim, allow_graceful=False))  # type: ignore[misc]


def disturbed(
    words: Sequence[str], kinds: Mapping[str, Any], seed: int = 7
) -> list[dict[str, Any]]:
    """Runs of some settings: for each kind of loss (name: function, count) a row."""
    rows = []
    for name, (function, count) in kinds.items():
        crew = on_actors([*WORDS, *COPIES, *words], STEPS)
        run = Disturbed(crew, random.Random(seed))
        try:
            function(run, count)
            rows.append(run.row(name))
        finally:
            crew.close()
        print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def run(bench: BenchSettings) -> None:
    """All kinds of losses by one transport, the machines last."""
    if bench.transport == "both":
        raise UserError("transport=both: losses are counted by one transport; store or stream")
    by = f"transport={bench.transport}"
    machines, points = bench.losses // 10, bench.losses // 6
    kinds = {
        "an actor": (actors_lost, bench.losses - machines - 3 * points),
        "an actor, and another while the run recovers": (lost_in_recovery, 2 * points),
        "an actor while a checkpoint is written": (lost_in_checkpoint, points),
    }
    owns = runtime.start(config.RaySettings(num_cpus=2))
    try:
        rows = disturbed(["hosts=2", by], kinds)
    finally:
        if owns:
            runtime.stop()
    rows += on_machines(by, machines)
    name = "bench_losses" + ("_stream" if by.endswith("stream") else "")
    print(write_table(bench.out, name, f"Losses in runs with copies, {by}", rows, NOTES))


def on_machines(by: str, losses: int) -> list[dict[str, Any]]:
    """Losses of simulated machines, which have one CPU each; the driver's has none to give."""
    before = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        words = ["hosts=1", "cpus_per_actor=1", by]

        def lost(run: Disturbed, count: int) -> None:
            machines_lost(run, count, cluster)

        return disturbed(words, {"a simulated machine": (lost, losses)}, seed=9)
    finally:
        ray.shutdown()
        cluster.shutdown()
        if before is None:
            del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
        else:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = before


NOTES = [
    f"""Runs with replicas=2 and a recovery point after every step (snapshot_every=1): 2 hosts, so
4 actors; on simulated machines 1 host on each of two. Seeded kills (SIGKILL) at a random moment of
a step, {BETWEEN} steps and more from loss to loss; N = 6, digits. `steps repeated`: of all
recoveries; at most in_flight + 1 = 3 are possible in one. `weights equal`: after every loss weights
and optimizer state were bit for bit those of microbatches=2 in one process, and so was the
checkpoint during which an actor was lost.""",
]
