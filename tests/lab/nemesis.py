"""A seeded nemesis: which actor is hurt how, in which phase of which step.

A fault strikes once. Actors strike themselves, so that they are where the phase says; what needs
the network or the driver is asked for in a file (`ask-<n>.json`), and the laboratory does it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.history import recorded
from treeprop_ray.hosts.base import Host
from treeprop_ray.methods.tree import TreeProp

PHASES = ("start", "forward", "backward", "update", "state", "evaluation", "recovery")
KINDS = ("kill", "pause")  # by the actor itself; all others by the laboratory
DRIVER = ("driver_kill", "driver_term", "head_loss")
NETWORK = ("cut", "cut_pair", "one_way", "slow", "lossy", "lose_host")


@dataclass(frozen=True)
class Fault:
    """At the first chance from `step` on, `actor` suffers `kind` in `phase`."""

    number: int
    kind: str
    phase: str
    actor: str
    step: int


def plan(
    seed: int, count: int, actors: Sequence[str], steps: int, kinds: Sequence[str] = KINDS
) -> list[Fault]:
    """So many faults, spread over the steps; every phase and kind comes about equally often."""
    dice = random.Random(seed)
    phases = [PHASES[k % len(PHASES)] for k in range(count)]
    chosen = [kinds[k % len(kinds)] for k in range(count)]
    dice.shuffle(phases)
    dice.shuffle(chosen)
    gap = max(1, (steps - 4) // max(1, count))
    return [
        Fault(k, kind, phase, dice.choice(list(actors)), 1 + k * gap + dice.randrange(gap))
        for k, (kind, phase) in enumerate(zip(chosen, phases, strict=True))
    ]


def strike(folder: Path, fault: Fault) -> None:
    """Once: note when, and do it."""
    try:
        (folder / f"fault-{fault.number}").open("x").write(str(time.time()))
    except FileExistsError:
        return
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "pause":
        os.kill(os.getpid(), signal.SIGSTOP)  # all threads; it is replaced after wave_timeout
    else:
        ask = folder / f"ask-{fault.number}.json"
        ask.with_suffix(".tmp").write_text(json.dumps(asdict(fault)))
        ask.with_suffix(".tmp").rename(ask)


def struck(folder: Path, faults: Sequence[Fault], host: Any, name: str) -> Any:
    """A host with the moments of its misfortune built in."""
    run, apply, state, load = host.run, host.apply, host.state, host.load
    autocast = host.autocast
    now = [0]

    def at(phase: str) -> None:
        for fault in faults:
            due = phase in ("start", "recovery") or now[0] >= fault.step
            if fault.phase == phase and fault.actor == name and due:
                strike(folder, fault)

    def run_it(call: Any, piece: Any, inputs: Any) -> Any:
        if piece.held is None:
            now[0] = piece.step
            at("forward")
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

    host.run, host.apply, host.state, host.load = run_it, apply_it, state_it, load_it
    host.autocast = autocast_it
    at("start")
    return host


class Struck(TreeProp):
    """TreeProp with a nemesis and a history."""

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self.folder, self.faults = folder, faults

    def host(self, job: Any, plan: Any, index: int) -> Host:
        """A host that suffers and is recorded."""
        name = plan.names[index].rpartition("/")[2]
        host: Any = recorded(self.folder, super().host(job, plan, index), name)
        (self.folder / f"{name}.pid").write_text(str(os.getpid()))
        struck_host: Host = struck(self.folder, self.faults, host, name)
        return struck_host
