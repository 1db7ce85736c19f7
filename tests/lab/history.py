"""What every actor did: (actor, step, part, hash of weights and optimizer), and the proof that it
is what an undisturbed run does."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treeprop_ray.methods.tree import TreeProp


@dataclass(frozen=True)
class Entry:
    """An actor has updated a part in a step; the hash is of what the part is then."""

    actor: str
    step: int
    part: str
    hash: str
    when: float = 0.0


@dataclass
class Verdict:
    """What the checker found; no complaints: the history is the undisturbed one."""

    steps: int = 0
    entries: int = 0
    repeated: int = 0  # steps that were done more than once
    complaints: list[str] = field(default_factory=list)


def clock() -> float:
    """The machine's clock, whatever a fault has done to Python's."""
    return time.clock_gettime(time.CLOCK_REALTIME)


def hashes(state: Any) -> dict[str, str]:
    """A hash of every part of a host's state, with its optimizer's slots."""
    weights, slots = state
    digests: dict[str, Any] = {}
    for key, tensor in sorted([*weights.items(), *slots.items()]):
        digest = digests.setdefault(key.partition("/")[0], hashlib.sha256())
        digest.update(key.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return {part: digest.hexdigest()[:16] for part, digest in digests.items()}


def record(folder: Path, actor: str, step: int, parts: dict[str, str]) -> None:
    """Append lines; one write, so that actors do not mix theirs."""
    now = f"{clock():.3f}"
    rows = (f"{actor} {step} {part} {value} {now}\n" for part, value in sorted(parts.items()))
    lines = "".join(rows)
    fd = os.open(folder / "history.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, lines.encode())
    finally:
        os.close(fd)


def recorded(folder: Path, host: Any, actor: str) -> Any:
    """A host that writes down what it is after every update."""
    apply, state = host.apply, host.state

    def apply_and_record(step: int, norms: Any) -> None:
        apply(step, norms)
        record(folder, actor, step, hashes(state()))

    host.apply = apply_and_record
    return host


def name_of(job: Any, plan: Any, index: int) -> str:
    """The name of the actor that a host is for."""
    copy = f"-copy-{job.copy.index}" if job.copy.index else ""
    return str(plan.names[index].rpartition("/")[2]) + copy


class Recorded(TreeProp):
    """TreeProp with a history."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def host(self, job: Any, plan: Any, index: int) -> Any:
        """A host that is recorded."""
        name = name_of(job, plan, index)
        return recorded(self.folder, super().host(job, plan, index), name)


def read(folder: Path) -> list[Entry]:
    """A history; the last line may be torn by a kill."""
    path = folder / "history.txt"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    words = [line.split() for line in lines if line.endswith("\n")]
    return [Entry(w[0], int(w[1]), w[2], w[3], float(w[4])) for w in words if len(w) == 5]


def check(found: Sequence[Entry], whole: Iterable[Entry], steps: int) -> Verdict:
    """Every update, also one that was repeated, must be that of the undisturbed history, and
    nothing of that may be missing."""
    expected = {(e.step, e.part): e.hash for e in whole}
    verdict = Verdict(steps, len(found))
    seen: dict[tuple[int, str], int] = {}
    for e in found:
        seen[e.step, e.part] = seen.get((e.step, e.part), 0) + 1
        right = expected.get((e.step, e.part))
        if right != e.hash:
            verdict.complaints.append(f"step {e.step}, part {e.part} of {e.actor}: other weights")
    wanted = {(step, part) for step, part in expected if step < steps}
    verdict.complaints += [f"step {s}, part {p}: never done" for s, p in sorted(wanted - set(seen))]
    verdict.repeated = len({step for (step, _), count in seen.items() if count > 1})
    return verdict
