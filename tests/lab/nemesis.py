"""A seeded nemesis: which actor is hurt how, in which phase of which step.

A fault strikes once. Actors strike themselves, so that they are where the phase says; what needs
the network or the driver is asked for in a file (`ask-<n>.json`), and the actor waits until the
laboratory has done it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.history import clock, name_of, recorded
from treeprop_ray.hosts.base import Host
from treeprop_ray.methods.tree import TreeProp
from treeprop_ray.run.storage import Disk

PHASES = ("start", "forward", "backward", "update", "state", "checkpoint", "evaluation", "probe",
          "recovery")  # fmt: skip
# by the actor itself; all others by the laboratory
KINDS = ("kill", "pause", "clock", "full_disk", "memory")
DRIVER = ("driver_kill", "driver_term", "head_loss")
NETWORK = ("cut", "cut_pair", "one_way", "slow", "lossy", "lose_host")
SKEW = 3600.0  # seconds by which a clock jumps
PATIENCE = 60.0  # seconds for the laboratory, or for Ray's monitor of memory, to act
CHUNK, SPARE = 1 << 29, 4 << 30  # bytes: taken at once; what is left to the machine


@dataclass(frozen=True)
class Fault:
    """At the first chance from `step` on, `actor` suffers `kind` in `phase`."""

    number: int
    kind: str
    phase: str
    actor: str
    step: int


def plan(
    seed: int,
    count: int,
    actors: Sequence[str],
    steps: int,
    kinds: Sequence[str] = KINDS,
    turn: int = 0,
) -> list[Fault]:
    """So many faults, spread over the steps, from a seed's `turn`-th on. A disk is full while a
    checkpoint is written."""
    dice = random.Random(f"{seed} {turn}")
    phases, chosen = (dealt(seed, cards, turn, count) for cards in (PHASES, kinds))
    gap = max(1, (steps - 4) // max(1, count))
    return [
        Fault(
            k, kind, "checkpoint" if kind == "full_disk" else phase, dice.choice(list(actors)),
            1 + k * gap + dice.randrange(gap),
        )
        for k, (kind, phase) in enumerate(zip(chosen, phases, strict=True))
    ]  # fmt: skip


def dealt(seed: int, cards: Sequence[str], start: int, count: int) -> list[str]:
    """Some cards of shuffled decks, one deck after the other: each comes equally often, and none
    goes with a layout, whose turns are regular."""
    decks: list[str] = []
    while len(decks) < start + count:
        deck = list(cards)
        random.Random(f"{seed} {len(cards)} {len(decks)}").shuffle(deck)
        decks += deck
    return decks[start : start + count]


def hog() -> None:
    """Take memory until Ray's monitor ends this process, not more than the machine can spare."""
    held, until = [], time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if meminfo("MemAvailable") > SPARE:
            held.append(b"\1" * CHUNK)
        time.sleep(0.05)


def meminfo(what: str) -> int:
    """What the system says of the machine's memory, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def strike(folder: Path, fault: Fault) -> None:
    """Once: note when, and do it."""
    try:
        (folder / f"fault-{fault.number}").open("x").write(str(clock()))
    except FileExistsError:
        return
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "pause":
        os.kill(os.getpid(), signal.SIGSTOP)  # all threads; it is replaced after wave_timeout
    elif fault.kind == "clock":
        time.time = lambda: clock() + SKEW
    elif fault.kind == "full_disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault.kind == "memory":
        hog()
    else:
        ask = folder / f"ask-{fault.number}.json"
        ask.with_suffix(".tmp").write_text(json.dumps(asdict(fault)))
        ask.with_suffix(".tmp").rename(ask)
        deadline = time.monotonic() + PATIENCE
        while ask.exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def struck(folder: Path, faults: Sequence[Fault], host: Any, name: str) -> Any:
    """A host with the moments of its misfortune built in."""
    run, apply, state, load = host.run, host.apply, host.state, host.load
    autocast, add = host.autocast, getattr(Disk.add, "whole", Disk.add)
    now = [0]

    def at(phase: str) -> None:
        for fault in faults:
            due = phase in ("start", "recovery") or now[0] >= fault.step
            if fault.phase == phase and fault.actor == name and due:
                strike(folder, fault)

    def run_it(call: Any, piece: Any, inputs: Any) -> Any:
        if piece.held is None:
            now[0] = piece.step
        at("forward" if piece.held is None else "probe")
        out = run(call, piece, inputs)
        if call.last and piece.held is None:
            at("backward")
        return out

    def apply_it(step: int, norms: Any) -> None:
        apply(step, norms)
        now[0] = step
        at("update")

    def state_it() -> Any:
        at("state")
        return state()

    def load_it(weights: Any, optimizer: Any) -> None:
        at("recovery")
        load(weights, optimizer)

    def autocast_it() -> Any:
        if not all(module.training for module in host.parts.values()):
            at("evaluation")
        return autocast()

    def add_it(disk: Disk, *words: Any) -> Any:
        at("checkpoint")
        return add(disk, *words)

    host.run, host.apply, host.state, host.load = run_it, apply_it, state_it, load_it
    host.autocast = autocast_it
    add_it.whole = add  # type: ignore[attr-defined]
    Disk.add = add_it  # type: ignore[method-assign]
    at("start")
    return host


class Struck(TreeProp):
    """TreeProp with a nemesis and a history."""

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self.folder, self.faults = folder, faults

    def host(self, job: Any, plan: Any, index: int) -> Host:
        """A host that suffers and is recorded."""
        name = name_of(job, plan, index)
        host: Any = recorded(self.folder, super().host(job, plan, index), name)
        struck_host: Host = struck(self.folder, self.faults, host, name)
        return struck_host
