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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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

COPIES = ["placement=packed", "max_failures=1000"]
BETWEEN = 4  # steps before a loss and after it
STEPS = 10**4  # that the run would have
META = {"epoch": 0, "split": "floor", "best": {}, "wall_seconds": 0.0}
Kill = Callable[[], None]
Kills = Callable[["Disturbed", int], list[Kill]]  # ways to lose so many, each another one
Losing = Callable[["Disturbed", int, Kills], None]


@dataclass
class Disturbed:
    """A run with copies, beside the same run in one process."""

    crew: RayEngine
    dice: random.Random
    step: int = 0
    pace: float = 0.1  # seconds of a step
    losses: int = 0
    equal: bool = True
    alone_at: int = 0
    alone: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.alone = undisturbed(self.crew.job.settings.replicas)

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

    def row(self, name: str, words: Sequence[str]) -> dict[str, Any]:
        """Of the table."""
        recovery = self.crew.recovery
        return {
            "lost": name,
            "copies": ", ".join(w for w in words if w.startswith(("replicas", "shard"))),
            "losses": self.losses,
            "recoveries": recovery.failures,
            "steps": self.step,
            "steps repeated": recovery.replayed,
            "most in a recovery": max(recovery.replays),
            "weights equal": str(self.equal).lower(),
        }


def undisturbed(replicas: int) -> Engine:
    """The same run in this process: as many micro-batches as there are copies."""
    torch.set_num_threads(1)
    settings = config.load([*WORDS, f"microbatches={replicas}"])
    return build(job_of(settings, data.load(settings), STEPS))


# -- who is lost ----------------------------------------------------------------------------------


def actors(run: Disturbed, count: int) -> list[Kill]:
    """Processes of actors."""
    pids = [pid_of(run.crew, k) for k in range(len(run.crew.driver.actors))]
    return [partial(os.kill, pid, signal.SIGKILL) for pid in run.dice.sample(pids, count)]


def machines(cluster: Cluster, run: Disturbed, count: int) -> list[Kill]:
    """Simulated machines with an actor; as many others join before."""
    for _ in range(count):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    used = run.crew.guarded(
        lambda: run.crew.driver.get([actor.machine.remote() for actor in run.crew.driver.actors])
    )
    nodes = [node for node in cluster.list_all_nodes() if node.node_id in used]
    chosen = run.dice.sample(nodes, count)
    return [partial(cluster.remove_node, node, allow_graceful=False) for node in chosen]


# -- when -----------------------------------------------------------------------------------------


def lost_in_a_step(run: Disturbed, losses: int, kills: Kills) -> None:
    """One at a time."""
    for _ in range(losses):
        (kill,) = kills(run, 1)
        run.lose(kill)


def lost_in_recovery(run: Disturbed, losses: int, kills: Kills) -> None:
    """Two, the second while the run recovers from the loss of the first."""
    for _ in range(losses // 2):
        first, second = kills(run, 2)
        before, wait = run.crew.recovery.failures, run.dice.uniform(0, 2)

        def later(before: int = before, second: Kill = second, wait: float = wait) -> None:
            while run.crew.recovery.failures == before:
                time.sleep(0.01)
            time.sleep(wait)
            second()

        thread = threading.Thread(target=later)

        def kill(first: Kill = first, thread: threading.Thread = thread) -> None:
            thread.start()
            first()

        run.lose(kill, count=2)
        thread.join()


def lost_in_checkpoint(run: Disturbed, losses: int, kills: Kills) -> None:
    """While the parts of a checkpoint are written; the checkpoint must be right."""
    for _ in range(losses):
        (kill,) = kills(run, 1)
        run.compare()
        done, expected = run.step, run.alone.state()
        with tempfile.TemporaryDirectory(prefix="treeprop-") as folder:
            meta = {"step": done, "N": run.crew.tree.N, **META}
            saving = shards.Saving(run.crew, Disk(Path(folder)), meta, {})
            time.sleep(run.dice.uniform(0, 0.02))
            kill()
            run.train(BETWEEN)
            saving.arrived(wait=True)
            saving.commit()
            point = checkpoint.load(Path(folder), done)
            run.equal &= equal((dict(point.weights), dict(point.optimizer)), expected)
        run.compare()
        run.losses += 1


WHEN: dict[str, Losing] = {
    "{}": lost_in_a_step,
    "{}, and another while the run recovers": lost_in_recovery,
    "{} while a checkpoint is written": lost_in_checkpoint,
}


def disturbed(
    what: str, words: Sequence[str], counts: Sequence[int], kills: Kills, seed: int = 7
) -> list[dict[str, Any]]:
    """Runs of some settings: for each kind of loss a row."""
    rows = []
    for (name, losing), count in zip(WHEN.items(), counts, strict=True):
        crew = on_actors([*WORDS, *COPIES, *words], STEPS)
        run = Disturbed(crew, random.Random(seed))
        try:
            losing(run, count, kills)
            rows.append(run.row(name.format(what), words))
        finally:
            crew.close()
        print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def run(bench: BenchSettings) -> None:
    """All kinds of losses by one transport, the machines last."""
    if bench.transport == "both":
        raise UserError("transport=both: losses are counted by one transport; store or stream")
    by, some = f"transport={bench.transport}", bench.losses // 10
    few = [some, 2 * max(1, some // 2), max(1, some // 2)]  # of each kind: sharded, machines
    plain = [bench.losses - 3 * some - 2 * sum(few), 2 * some, some]
    owns = runtime.start(config.RaySettings(num_cpus=2))
    try:
        rows = disturbed("an actor", ["replicas=2", "hosts=2", by], plain, actors)
        words = ["replicas=2", "shard_optimizer=true", "hosts=2", by]
        rows += disturbed("an actor", words, few, actors)
    finally:
        if owns:
            runtime.stop()
    rows += on_machines(by, few)
    name = "bench_losses" + ("_stream" if by.endswith("stream") else "")
    print(write_table(bench.out, name, f"Losses in runs with copies, {by}", rows, NOTES))


def on_machines(by: str, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Losses of simulated machines, which have one CPU each; the driver's has none to give."""
    before = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        words = ["replicas=3", "hosts=1", "cpus_per_actor=1", by]
        return disturbed("a simulated machine", words, counts, partial(machines, cluster), seed=9)
    finally:
        ray.shutdown()
        cluster.shutdown()
        if before is None:
            del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
        else:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = before


NOTES = [
    f"""Settings of copies as they are by default: actors keep their states of the last
in_flight + 1 = 3 steps, a recovery point every 50 steps. Two copies of 2 hosts, so 4 actors; on
simulated machines three copies of 1 host, an actor on each. Seeded kills (SIGKILL) at a random
moment of a step, {BETWEEN} steps and more from loss to loss; N = 6, digits. `steps repeated`: of
all recoveries, steps that a living actor had begun; aim: at most 3 in one. `weights equal`: after
every loss weights and optimizer state were bit for bit those of as many micro-batches in one
process, and so was the checkpoint during which somebody was lost.""",
]
