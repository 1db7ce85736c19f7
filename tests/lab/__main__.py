"""The laboratory: seeded faults in every phase, a recorded history, and its proof.

    PYTHONPATH=.:tests python -m lab faults=100 seed=1 to=results/local   as root: hosts too
    PYTHONPATH=.:tests python -m lab faults=8 hosts=false             one machine, no root

A run is disturbed by a handful of faults; stores and streams, an actor per node, packed actors and
copies take turns. A driver that a fault has ended is started again with the same command, as a user
would do. Fine is a run whose history is that of an undisturbed one. Rows are written as they come
(`to`/lab_faults_rows.csv): the same command goes on where an earlier one was ended, and with
`minutes=10` no run is begun after ten minutes.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lab import hosts, nemesis, pages
from lab.runs import PATHS, Run, disturb, judge, undisturbed
from lab.switch import possible
from treeprop_ray.run.folder import provenance

WORDS = ["model.blocks=3", "model.hidden=8", "batch=32", "beta=0.5", "model.activation=tanh",
         "alpha=1", "sigma=0.05", "clip=0.05", "name=r", "loggers=[csv]", "timeline_steps=0",
         "checkpoint_every=5", "keep_last=2", "keep_best=false", "log_every=5", "eval_every=1",
         "data.limit=320", "snapshot_every=4", "max_failures=50", "epochs=1000"]  # fmt: skip
NODES = ["boundary", "node-1", "node-2", "node-3"]
TWINS = ["host-0", "host-0-copy-1"]
# name, how a run is laid out, what the undisturbed run needs besides, who can be hurt
LAYOUTS: list[tuple[str, list[str], list[str], list[str]]] = [
    ("two packed actors", ["placement=packed", "hosts=2"], [], ["host-0", "host-1"]),
    ("an actor per node", ["placement=per_node"], [], NODES),
    ("two copies", ["placement=packed", "hosts=1", "replicas=2"], ["microbatches=2"], TWINS),
]
MIX = ("kill", "driver_term", "kill", "clock", "kill", "full_disk", "kill", "driver_kill", "pause",
       "memory", "kill", "head_loss")  # fmt: skip


@dataclass
class Lab:
    """Settings of the laboratory."""

    faults: int = 100
    seed: int = 1
    each: int = 3  # faults of a run
    steps: int = 24
    hosts: str = "auto"  # true, false; auto: as root
    jobs: int = 1  # runs at the same time; of several, one is on hosts
    minutes: float = 1e9  # after which no run is begun
    to: str = ""


class Laboratory:
    """Runs what is not in the rows yet."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.path = Path(lab.to or folder) / "lab_faults_rows.csv"
        self.rows: list[Any] = list(pages.stored(self.path))
        self.commit = provenance()["commit"]
        self.ends = time.monotonic() + 60 * lab.minutes
        self.lock = threading.Lock()

    def due(self, names: Sequence[str]) -> Iterator[str]:
        """Names of runs that are not done, while there is time and faults are wanted."""
        for name in names:
            there = {row["run"] for row in self.rows}
            if name not in there and time.monotonic() < self.ends:
                yield name

    def add(self, name: str, layout: str, transport: str, run: Run) -> None:
        """Keep and tell how a run went."""
        wrong = "; ".join(run.complaints)
        about = {
            "run": name, "commit": self.commit, "layout": layout, "transport": transport,
            "drivers": run.drivers, "run_seconds": round(run.seconds), "wrong": wrong,
        }  # fmt: skip
        rows = [{**about, **row} for row in run.rows]
        with self.lock:
            pages.store(self.path, rows)
            self.rows += rows
        suffered = ", ".join(f"{row['kind']} in {row['phase']}" for row in rows)
        print(f"{name}: {layout}, {transport}, {run.seconds:.0f} s, {run.drivers} drivers, "
              f"{suffered}: {wrong or 'the undisturbed history'}", flush=True)  # fmt: skip

    def all(self, on_hosts: bool) -> None:
        """Everything that is due; hosts beside the one machine, if several runs may be."""
        network = 2 * len(hosts.KINDS) if on_hosts else 0
        beside = on_hosts and self.lab.jobs > 1
        with ThreadPoolExecutor(1 + beside) as pool:
            jobs = self.lab.jobs - beside
            parts = [pool.submit(self.machine, max(0, self.lab.faults - network), jobs)]
            parts += [pool.submit(self.on_hosts)] if on_hosts else []
            for part in parts:
                part.result()

    def machine(self, wanted: int, jobs: int) -> None:
        """Faults on one machine, until so many have happened."""
        lab = self.lab

        def happened() -> int:
            return sum(row["run"].startswith("machine") for row in self.rows)

        def one(k: int) -> None:
            name, layout = f"machine-{k}", LAYOUTS[k % len(LAYOUTS)]
            if happened() < wanted:
                for _ in self.due([name]):
                    self.disturbed(k, name, layout)

        if happened() >= wanted:
            return
        whole = {tuple(alike): alike for _, _, alike, _ in LAYOUTS}
        for alike in whole.values():
            self.whole(alike)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, range(2 * -(-wanted // lab.each))))

    def whole(self, alike: Sequence[str]) -> Any:
        """The undisturbed history of a layout."""
        folder = self.folder / f"whole-{len(alike)}"
        return undisturbed(folder, [*WORDS, *alike], self.lab.steps)

    def disturbed(self, k: int, name: str, layout: tuple[str, list[str], list[str], Any]) -> None:
        """One run with its faults."""
        lab, (about, words, alike, actors) = self.lab, layout
        transport = ("store", "stream")[k // len(LAYOUTS) % 2]
        faults = nemesis.plan(lab.seed, lab.each, actors, lab.steps, MIX, turn=k * lab.each)
        words = [*WORDS, "engine=ray", *words, f"transport={transport}", "wave_timeout=20"]
        run = Run(self.folder / name, words, faults, lab.steps)
        disturb(run, answer=10.0)
        judge(run, self.whole(alike))
        self.add(name, about, transport, run)

    def on_hosts(
        self,
        kinds: Sequence[str] = hosts.KINDS,
        transports: Sequence[str] = ("store", "stream"),
        steps: int = 24,
    ) -> list[Run]:
        """Faults of hosts and of the network between them: one run for each."""
        plan = {f"hosts-{kind}-{t}": (kind, t) for t in transports for kind in kinds}
        names, runs = list(self.due(list(plan))), []
        if not names:
            return []
        big = [*WORDS, *hosts.BIG]
        whole = undisturbed(self.folder / "whole-hosts", big, steps)
        with hosts.cluster(3, self.folder / "cluster", PATHS) as cluster:
            for k, name in enumerate(self.due(names)):
                kind, transport = plan[name]
                words = [*big, *hosts.words_of(cluster, transport)]
                where = [*cluster.switch.hosts[0].inside("env", *cluster.exported())]
                run = Run(self.folder / name, words, [hosts.fault_of(kind, k, 8)], steps, where)
                run.between = cluster.mend
                disturb(run, cluster.act)
                judge(run, whole)
                self.add(name, "three hosts", transport, run)
                runs.append(run)
                cluster.mend()
        return runs


def main(argv: list[str]) -> int:
    """Run the laboratory; 1 if a history is not the undisturbed one."""
    given = dict(word.split("=", 1) for word in argv)
    kinds = {f.name: type(getattr(Lab(), f.name)) for f in fields(Lab)}
    lab = Lab(**{key: kinds[key](value) for key, value in given.items()})
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="treeprop-lab-"))
        laboratory = Laboratory(lab, Path(folder))
        on_hosts = lab.hosts == "true" or (lab.hosts == "auto" and not possible())
        laboratory.all(on_hosts)
        if not on_hosts:
            print(f"hosts: skipped ({possible() or 'not asked for'})")
        rows = laboratory.rows
    if lab.to and rows:
        note = [] if on_hosts else ["Hosts in network namespaces were skipped."]
        print(pages.write(Path(lab.to), rows, lab.faults, note))
    wrong = {row["run"] for row in rows if row["wrong"]}
    print(f"{len(rows)} of {lab.faults} faults, wrong runs: {', '.join(sorted(wrong)) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
