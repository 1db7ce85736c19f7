"""Checkpoints that no process ever holds: every actor writes its own part, while training goes on.

    driver     begin ──────────────────────────────── all there? ── meta, manifest, commit
    actor 0    copy of its state ── thread: weights-00000, optimizer-00000 ─┘
    actor 1    copy of its state ── thread: weights-00001, optimizer-00001 ─┘
    training   step 12 │ step 13 │ step 14 …

The threads write slowly (pace.py) until somebody waits for them: the next checkpoint, a signal, the
end of the run. Files are keyed by edge like those of one process, so any number of actors, or none,
can read them. An actor whose machine does not see the folder hands its part to the driver, one at a
time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from treeprop_ray.core import tensor_file
from treeprop_ray.data.streams import resumed
from treeprop_ray.engine import Engine
from treeprop_ray.errors import TrainingError
from treeprop_ray.hosts.base import Host, State
from treeprop_ray.run import checkpoint, pace
from treeprop_ray.run.pace import Pace
from treeprop_ray.run.storage import MANIFEST, Storage

KINDS = ("weights", "optimizer")
PATIENCE = 1.0  # seconds for which an actor waits for its thread, when the driver waits
LOOK = 0.5  # seconds from one look at actors to the next, at most
Written = tuple[dict[str, str], tuple[str, ...]]  # checksums by file, names of the slots

_under_way: dict[tuple[str, int], tuple[Pace, Future[Written | State]]] = {}  # in an actor


def _gives_way() -> None:
    """The thread that writes takes what training leaves of the cores, and where that is nothing one
    part in 24: Linux's weight of a nice value 14 above."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, nice + 14))


_thread = ThreadPoolExecutor(1, "treeprop-writer", initializer=_gives_way)


# -- in the actors --------------------------------------------------------------------------------


def write(host: Host, storage: Storage, name: str, token: str, index: int) -> None:
    """Begin to write the host's state as it is now."""
    key = storage.at(name), index
    if key in _under_way:  # begun before somebody was lost
        _under_way.pop(key)[0].stop()
    state, own = host.state(), Pace()
    sees = storage.sees(name, token)
    work = partial(write_files, storage, name, index, state, own) if sees else lambda: state
    _under_way[key] = own, _thread.submit(work)


def written(
    host: Host, storage: Storage, name: str, index: int, wait: bool, _: object
) -> Written | State | None:
    """What was written, or the state where that is not possible; None while it is under way.
    `wait`: somebody does, so make haste. `_` is the answer of `write`: if that has failed, so does
    this."""
    key = storage.at(name), index
    own, work = _under_way[key]
    if wait:
        own.hurry()
        futures.wait([work], PATIENCE)
    if not work.done():
        return None
    del _under_way[key]
    return work.result()


def write_files(storage: Storage, name: str, index: int, state: State, own: Pace) -> Written:
    """The files of one actor."""
    sums = {}
    for kind, tensors in zip(KINDS, state, strict=True):
        if tensors:
            file = f"{kind}-{index:05d}.safetensors"
            fill = partial(pace.write, tensor_file.slices(tensors), own)
            sums[file] = storage.add(name, file, fill)
    return sums, tuple(state[1])


def sees(host: Host, storage: Storage, step: int) -> bool:
    """Whether the host's machine can read a checkpoint."""
    return checkpoint.manifest(storage, step) is not None


def read_own(storage: Storage, step: int, host: Host) -> None:
    """Have a host take up its parts of a checkpoint, which the driver has verified."""
    point = checkpoint.load(storage, step, verify=False)
    host.load(point.weights, resumed(point.optimizer))


# -- in the driver --------------------------------------------------------------------------------


class Saving:
    """A checkpoint under way."""

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        meta: Mapping[str, Any],
        marks: Mapping[str, str],
    ) -> None:
        self.engine, self.storage, self.meta, self.marks = engine, storage, dict(meta), marks
        self.step = meta["step"]
        self.name = checkpoint.name_of(self.step)
        self.asked: dict[int, Any] = {}  # questions to actors that are not answered yet
        self.parts: dict[int, Written] = {}
        if not checkpoint.is_ours(checkpoint.manifest(storage, self.step) or {}, marks):
            raise TrainingError(f"{storage.at(self.name)}: is of another run, which is left alone")
        self.begin()
        engine.storing(self)

    def begin(self) -> None:
        """Have all actors write; again, if some were lost and all are back at the step."""
        with checkpoint.told(self.storage, self.name):
            token = self.storage.begin(self.name)
        self.parts.clear()
        self.asked.clear()
        self.pause, self.looks_at = 0.0, 0.0
        for index in range(self.engine.actors):
            words = (self.storage, self.name, token, index)
            self._ask(index, False, self.engine.ask(index, write, *words))

    def _ask(self, index: int, wait: bool, begun: Any = None) -> None:
        words = (self.storage, self.name, index, wait, begun)
        self.asked[index] = self.engine.ask(index, written, *words)

    def arrived(self, wait: bool) -> bool:
        """Whether all parts are written; `wait`: until they are."""
        self.engine.guarded(partial(self._look, wait))
        return not self.asked

    def _look(self, wait: bool) -> None:
        """A question stands between the steps of an actor, so there are few."""
        if not wait and time.monotonic() < self.looks_at:
            return
        self.pause = min(LOOK, 2 * self.pause + 0.01)
        self.looks_at = time.monotonic() + self.pause
        while self.asked:
            for index, answer in list(self.asked.items()):
                if not (wait or self.engine.ready([answer])):
                    continue
                (part,) = self.engine.get([answer])
                if part is None:
                    self._ask(index, wait)
                    continue
                if isinstance(part[1], dict):  # the actor does not see the storage
                    with checkpoint.told(self.storage, self.name):
                        part = write_files(self.storage, self.name, index, part, in_haste())
                self.parts[index] = part
                del self.asked[index]
            if not wait:
                break
        if not self.asked:  # all is on disk: a loss no longer matters
            self.engine.storing(None)

    def commit(self) -> str:
        """Make it a checkpoint; returns where it is."""
        sums = {file: s for part, _ in self.parts.values() for file, s in part.items()}
        slots = {name for _, names in self.parts.values() for name in names}
        meta = json.dumps({**self.meta, "slots": checkpoint.names_digest(slots)}, indent=2)
        with checkpoint.told(self.storage, self.name):
            file = checkpoint.FILES[2]
            sums[file] = self.storage.add(self.name, file, partial(_write_text, meta))
            text = json.dumps({**sums, **self.marks}, indent=2)
            self.storage.add(self.name, MANIFEST, partial(_write_text, text))
            self.storage.commit(self.name)
        return self.storage.at(self.name)


def in_haste() -> Pace:
    """For who is waited for from the start."""
    own = Pace()
    own.hurry()
    return own


def _write_text(text: str, path: Path) -> str:
    path.write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()
