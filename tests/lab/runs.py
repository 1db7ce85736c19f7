"""Disturbed runs: their drivers are started, hurt, started again, and their histories judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab import history
from lab.nemesis import Fault, meminfo
from lab.processes import below

TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join([str(TESTS.parent), str(TESTS)])
LIMIT = 900.0  # seconds; a run that takes longer hangs
ROOM = 8 << 30  # bytes above what is used now: where Ray's monitor takes memory for scarce
# how a driver ends that a fault may end, and what its last line says
ENDS = {
    "driver_kill": (-signal.SIGKILL, ""),
    "driver_term": (143, "the same command continues from"),
    "head_loss": (1, "last checkpoint"),
    "full_disk": (1, "last checkpoint"),
}


@dataclass
class Run:
    """One disturbed run and how it ended."""

    folder: Path
    words: list[str]
    faults: list[Fault]
    steps: int
    where: list[str] = field(default_factory=list)  # what stands before the driver's command
    between: Callable[[], None] | None = None  # mends what a fault has broken, for the next driver
    by_hand: bool = False  # every fault ends the driver, and the command is given again
    drivers: int = 0
    starts: list[float] = field(default_factory=list)  # when drivers were started
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the faults that happened

    def struck(self, fault: Fault) -> float | None:
        """When a fault happened; None: not yet."""
        mark = self.folder / f"fault-{fault.number}"
        return float(mark.read_text() or 0) if mark.is_file() else None


def disturb(run: Run, act: Callable[[Fault], None] | None = None, answer: float = 20.0) -> None:
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
        how = drive(run, spec, act, began)
        if how == "done":
            break
        if how == "failed" or run.drivers > len(run.faults) + 2:
            run.complaints.append(f"driver {run.drivers} failed: {last_line(run.folder)}")
            return
        if run.between:
            run.between()
    run.seconds = time.monotonic() - began


def drive(run: Run, spec: Path, act: Callable[[Fault], None] | None, began: float) -> str:
    """One life of the driver: done, ended (by a fault that may end it), or failed."""
    env = {**os.environ, "PYTHONPATH": PATHS, "RAY_worker_niceness": "0"}
    if any(fault.kind == "memory" for fault in run.faults):
        env["RAY_memory_usage_threshold"] = f"{min(0.95, scarce()):.3f}"
    earlier = {f for f in run.faults if run.struck(f) is not None}
    with (run.folder / "driver.log").open("a") as log:
        command = [*run.where, sys.executable, "-m", "lab.driver", str(spec)]
        run.starts.append(history.clock())
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        while (code := process.poll()) is None:
            for ask in sorted(run.folder.glob("ask-*.json")):
                fault = Fault(**json.loads(ask.read_text()))
                if fault.kind == "driver_kill":
                    process.kill()
                elif fault.kind == "driver_term":
                    process.terminate()
                elif act is not None:
                    act(fault)
                else:
                    lose_head(process.pid)
                ask.unlink()  # the actor that has asked goes on
            if time.monotonic() - began > LIMIT:
                process.kill()
                run.complaints.append("hangs")
                break
            time.sleep(0.05)
        process.wait()
        reap(process.pid)
    if code == 0:
        return "done"
    hits = [f.kind for f in run.faults if run.struck(f) is not None and f not in earlier]
    ended = [kind for kind in hits if run.by_hand or kind in ENDS]
    if code is None or not ended:
        return "failed"
    told = last_line(run.folder)
    if run.by_hand and "last checkpoint" not in told:
        run.complaints.append(f"told {told!r}")
    elif not run.by_hand and not any(
        ENDS[kind][0] == code and ENDS[kind][1] in told for kind in ended
    ):
        run.complaints.append(f"{ended[-1]}: code {code}, told {told!r}")
    return "ended"


def scarce() -> float:
    """The share of the machine's memory that is used when there is ROOM no more."""
    total = meminfo("MemTotal")
    return (total - meminfo("MemAvailable") + ROOM) / total


def lose_head(driver: int) -> None:
    """Kill the control store of the driver's own Ray."""
    for pid, command in below(driver).items():
        if "gcs_server" in command:
            os.kill(pid, signal.SIGKILL)


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
    run.complaints += history.check(found, whole, run.steps).complaints[:5]
    if "Traceback" in (run.folder / "driver.log").read_text(errors="replace"):
        run.complaints.append("a traceback in the driver's log")
    times = {f: when for f in run.faults if (when := run.struck(f)) is not None}
    for fault, when in times.items():
        later = [t for t in times.values() if t > when]
        until = min(later, default=float("inf"))
        # a driver that ends may still finish a step: what counts is the next one
        since = min((t for t in run.starts if t > when and fault.kind in ENDS), default=when)
        before = max((e.step for e in found if e.when <= since), default=-1)
        new = [e.when for e in found if e.when > since and e.step > before]
        again = {e.step for e in found if since < e.when <= until and e.step <= before}
        # a fault that strikes while another is being mended is timed with that one
        whole_time = new and min(new) <= until
        run.rows.append({
            **asdict(fault), "repeated": len(again),
            "seconds": round(min(new) - when, 2) if whole_time else "",
        })  # fmt: skip


def undisturbed(folder: Path, words: Sequence[str], steps: int) -> list[history.Entry]:
    """The history of the local engine."""
    run = Run(folder, [*words, "engine=local"], [], steps)
    if not (folder / "done").is_file():
        disturb(run)
        assert not run.complaints, run.complaints
        (folder / "done").touch()
    return history.read(folder)
