"""The laboratory: seeded faults in every phase, a recorded history, and its proof.

    PYTHONPATH=.:tests python -m lab faults=100 seed=1 to=results     as root: hosts too (make lab)
    PYTHONPATH=.:tests python -m lab faults=8 hosts=false             one machine, no root

Runs of twelve steps or more are disturbed by a handful of faults each; stores and streams, an actor
per node and packed actors take turns. A driver that a fault has ended is started again with the
same command, as a user would do. Fine is a run whose history is that of an undisturbed one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lab import history, hosts, nemesis
from lab.nemesis import Fault
from lab.switch import possible

TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join([str(TESTS.parent), str(TESTS)])
WORDS = ["model.blocks=5", "model.hidden=8", "batch=32", "beta=0.5", "model.activation=tanh",
         "alpha=1", "sigma=0.05", "clip=0.05", "name=r", "loggers=[csv]", "timeline_steps=0",
         "checkpoint_every=5", "keep_last=2", "keep_best=false", "log_every=5", "eval_every=1",
         "data.limit=320", "snapshot_every=4", "max_failures=50"]  # fmt: skip
NODES = ["boundary", "node-1", "node-2", "node-3", "node-4", "node-5"]
LAYOUTS: list[tuple[list[str], list[str]]] = [
    (["placement=packed", "hosts=2"], ["host-0", "host-1"]),
    (["placement=per_node"], NODES),
]
LIMIT = 900.0  # seconds; a run that takes longer hangs


@dataclass
class Run:
    """One disturbed run and how it ended."""

    folder: Path
    words: list[str]
    faults: list[Fault]
    steps: int
    where: list[str] = field(default_factory=list)  # what stands before the driver's command
    between: Callable[[], None] | None = None  # mends what a fault has broken, for the next driver
    drivers: int = 0
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    repeated: int = 0
    happened: dict[int, float] = field(default_factory=dict)  # fault -> when
    recovered: dict[int, float] = field(default_factory=dict)  # fault -> seconds


def disturb(run: Run, act: Any = None, answer: float = 20.0) -> None:
    """Start the driver, again where a fault has ended it, until the run is finished."""
    run.folder.mkdir(parents=True, exist_ok=True)
    spec = run.folder / "spec.json"
    words = [*run.words, f"steps={run.steps}", f"out={run.folder / 'runs'}"]
    faults = [asdict(f) for f in run.faults]
    spec.write_text(
        json.dumps({"words": words, "folder": str(run.folder), "faults": faults, "answer": answer})
    )
    began = time.monotonic()
    while True:
        run.drivers += 1
        ended_by_us = drive(run, spec, act, began)
        if ended_by_us == "done":
            break
        if ended_by_us == "failed" or run.drivers > len(run.faults) + 2:
            run.complaints.append(f"driver {run.drivers} failed: {last_line(run.folder)}")
            return
        if run.between:
            run.between()
    run.seconds = time.monotonic() - began


def drive(run: Run, spec: Path, act: Any, began: float) -> str:
    """One life of the driver: done, ended (by a fault that may end it), or failed."""
    env = {**os.environ, "PYTHONPATH": PATHS}
    with (run.folder / "driver.log").open("a") as log:
        command = [*run.where, sys.executable, "-m", "lab.driver", str(spec)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        hit = ""
        while (code := process.poll()) is None:
            for ask in sorted(run.folder.glob("ask-*.json")):
                fault = Fault(**json.loads(ask.read_text()))
                ask.unlink()
                if fault.kind == "driver_kill":
                    process.kill()
                elif fault.kind == "driver_term":
                    process.terminate()
                elif fault.kind == "head_loss" and act is None:
                    lose_head(process.pid)
                else:
                    act(fault)
                hit = fault.kind if fault.kind in nemesis.DRIVER else hit
            if time.monotonic() - began > LIMIT:
                process.kill()
                run.complaints.append("hangs")
                return "failed"
            time.sleep(0.1)
        reap(process.pid)
    if code == 0:
        return "done"
    expected = {"driver_kill": -signal.SIGKILL, "driver_term": 143, "head_loss": 1}
    if hit and code != expected[hit]:
        run.complaints.append(f"{hit}: code {code}: {last_line(run.folder)}")
    if hit in ("driver_term", "head_loss"):
        told = last_line(run.folder)
        if "checkpoint" not in told and "continues from" not in told:
            run.complaints.append(f"{hit}: told {told!r}")
    return "ended" if hit else "failed"


def lose_head(driver: int) -> None:
    """Kill the control store of the driver's own Ray."""
    for pid, command in children(driver):
        if "gcs_server" in command:
            os.kill(pid, signal.SIGKILL)


def children(root: int) -> list[tuple[int, str]]:
    """The processes below one, with their commands."""
    below: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            below.setdefault(parent, []).append((int(entry.name), command))
    found, todo = [], [root]
    while todo:
        for pid, command in below.get(todo.pop(), []):
            found.append((pid, command))
            todo.append(pid)
    return found


def reap(session: int) -> None:
    """Paused actors of a driver that is gone do not go by themselves."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def last_line(folder: Path) -> str:
    """What the driver said last."""
    lines = (folder / "driver.log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def judge(run: Run, whole: Sequence[history.Entry]) -> None:
    """Compare the history with the undisturbed one, and time the recoveries."""
    found = history.read(run.folder)
    verdict = history.check(found, whole, run.steps)
    run.complaints += verdict.complaints[:5]
    run.repeated = verdict.repeated
    log = (run.folder / "driver.log").read_text(errors="replace")
    if "Traceback" in log:
        run.complaints.append("a traceback in the driver's log")
    for fault in run.faults:
        mark = run.folder / f"fault-{fault.number}"
        if mark.is_file():
            run.happened[fault.number] = when = float(mark.read_text() or 0)
            before = max((e.step for e in found if e.when <= when), default=-1)
            after = [e.when for e in found if e.when > when and e.step > before]
            if after:
                run.recovered[fault.number] = min(after) - when


def undisturbed(folder: Path, words: Sequence[str], steps: int) -> list[history.Entry]:
    """The history of the local engine."""
    run = Run(folder, [*words, "engine=local"], [], steps)
    disturb(run)
    assert not run.complaints, run.complaints
    return history.read(folder)


@dataclass
class Lab:
    """Settings of the laboratory."""

    faults: int = 100
    seed: int = 1
    each: int = 5  # faults of a run
    steps: int = 40
    hosts: str = "auto"  # true, false; auto: as root
    to: str = ""


def machine(lab: Lab, folder: Path) -> list[Run]:
    """Faults on one machine."""
    whole = undisturbed(folder / "whole", WORDS, lab.steps)
    runs = []
    for k in range(-(-lab.faults // lab.each)):
        layout, actors = LAYOUTS[k % 2]
        transport = ("store", "stream")[k // 2 % 2]
        count = min(lab.each, lab.faults - k * lab.each)
        kinds = [*nemesis.KINDS, "kill", "kill", *nemesis.DRIVER]
        faults = nemesis.plan(lab.seed * 1000 + k, count, actors, lab.steps, kinds)
        words = [*WORDS, "engine=ray", *layout, f"transport={transport}", "wave_timeout=30"]
        run = Run(folder / f"run-{k}", words, faults, lab.steps)
        disturb(run)
        if not run.complaints:
            judge(run, whole)
        told = "; ".join(run.complaints) or "the undisturbed history"
        suffered = ", ".join(f"{f.kind} in {f.phase}" for f in faults)
        about = f"{transport} {layout[0]} {run.seconds:.0f} s, {run.drivers} drivers"
        print(f"run {k}: {about}, {len(run.happened)} of {count} ({suffered}): {told}", flush=True)
        runs.append(run)
    return runs


def on_hosts(
    steps: int,
    folder: Path,
    kinds: Sequence[str] = hosts.KINDS,
    transports: Sequence[str] = ("store", "stream"),
) -> list[Run]:
    """Faults of hosts and of the network between them: one run for each."""
    whole = undisturbed(folder / "whole-hosts", WORDS, steps)
    runs = []
    with hosts.cluster(3, folder / "cluster", PATHS) as cluster:
        for k, (kind, transport) in enumerate((k, t) for t in transports for k in kinds):
            words = [*WORDS, *hosts.words_of(cluster, transport)]
            where = [*cluster.switch.hosts[0].inside("env", *cluster.exported())]
            run = Run(folder / f"hosts-{k}", words, [hosts.fault_of(kind, k, 8)], steps, where)
            run.between = cluster.mend
            disturb(run, cluster.act)
            if not run.complaints:
                judge(run, whole)
            told = "; ".join(run.complaints) or "the undisturbed history"
            print(f"hosts: {kind} with {transport}, {run.seconds:.0f} s: {told}", flush=True)
            runs.append(run)
            cluster.mend()
    return runs


def table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """By kind of fault: how many, how long until the next new step."""
    by_kind: dict[str, list[tuple[Run, Fault]]] = {}
    for run in runs:
        for fault in run.faults:
            if fault.number in run.happened:
                by_kind.setdefault(fault.kind, []).append((run, fault))
    rows = []
    for kind, hits in sorted(by_kind.items()):
        times = sorted(r.recovered[f.number] for r, f in hits if f.number in r.recovered)
        phases = sorted({f.phase for _, f in hits})
        rows.append({
            "fault": kind, "times": str(len(hits)), "in phases": ", ".join(phases),
            "median seconds to a new step": f"{times[len(times) // 2]:.1f}" if times else "-",
            "longest": f"{times[-1]:.1f}" if times else "-",
            "wrong": str(sum(bool(r.complaints) for r, _ in hits)),
        })  # fmt: skip
    return rows


def main(argv: list[str]) -> int:
    """Run the laboratory; 1 if a history is not the undisturbed one."""
    given = dict(word.split("=", 1) for word in argv)
    kinds = {f.name: type(getattr(Lab(), f.name)) for f in fields(Lab)}
    lab = Lab(**{key: kinds[key](value) for key, value in given.items()})
    with tempfile.TemporaryDirectory(prefix="treeprop-lab-") as folder:
        runs = machine(lab, Path(folder))
        if lab.hosts == "true" or (lab.hosts == "auto" and not possible()):
            runs += on_hosts(lab.steps, Path(folder))
        else:
            print(f"hosts: skipped ({possible() or 'not asked for'})")
    rows = table(runs)
    wrong = [c for run in runs for c in run.complaints]
    if lab.to:
        from treeprop_ray.reporting.tables import write_table

        happened = sum(len(run.happened) for run in runs)
        notes = [
            f"{happened} faults in {len(runs)} runs of {lab.steps} steps, seed {lab.seed}; "
            f"{sum(run.repeated for run in runs)} steps were done more than once, "
            f"{sum(run.drivers - 1 for run in runs)} drivers were started again. Every update of "
            "every actor was compared with the undisturbed history. Wrong: faults in runs whose "
            f"history differs, that hung or said more than a line: {'; '.join(wrong) or 'none'}.",
        ]
        print(write_table(lab.to, "lab_faults", "Faults by kind", rows, notes))
    print(json.dumps({"runs": len(runs), "wrong": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
