"""How a run keeps its state (checkpoint.py, shards.py), takes it up again, and says where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from treeprop_ray.config import Settings
from treeprop_ray.data.streams import resumed
from treeprop_ray.engine import Engine
from treeprop_ray.errors import Terminated, TrainingError
from treeprop_ray.run import checkpoint, shards
from treeprop_ray.run.checkpoint import Checkpoint
from treeprop_ray.run.folder import RunFolder, this_command


class Keeper:
    """The checkpoints of one run; without a folder there are none."""

    def __init__(self, settings: Settings, folder: RunFolder | None) -> None:
        self.settings, self.folder = settings, folder
        self.last = ""  # where the last checkpoint is
        self.saving: shards.Saving | None = None  # one that actors are writing
        self.after: list[Callable[[], None]] = []  # what follows it

    def newest(self, N: int) -> Checkpoint | None:
        """The checkpoint to go on from."""
        if self.folder is None or self.settings.fresh:
            return None
        point = checkpoint.newest(self.folder.storage)
        if point:
            checkpoint.check_fits(point, N, self.settings.split)
            self.folder.identity.check(point)
            self.last = point.path
        return point

    def take_up(self, engine: Engine, point: Checkpoint) -> None:
        """Every actor reads its own parts, if all of them see the checkpoint."""
        start, storage = point.meta["step"], self.folder.storage if self.folder else None
        if engine.spread and storage is not None:
            words, each = (shards.sees, storage, start), range(engine.actors)
            if all(engine.guarded(lambda: engine.get([engine.ask(k, *words) for k in each]))):
                engine.take_up(partial(shards.read_own, storage, start), start)
                return
        engine.load((dict(point.weights), dict(resumed(point.optimizer))), start)

    def has(self, done: int) -> bool:
        """Whether the state after `done` steps is kept; always where nothing is."""
        return self.folder is None or done in checkpoint.steps(self.folder.storage)

    def save(self, engine: Engine, meta: dict[str, Any], then: Callable[[], None]) -> None:
        """Write a checkpoint, or have actors begin to; `then` follows when it is there."""
        assert self.folder is not None
        s, done = self.settings, meta["step"]
        best = meta["best"]["step"] if s.keep_best else None
        marks, storage = self.folder.identity.marks(), self.folder.storage
        if engine.spread:
            self.settle(wait=True)
            size = 3 * sum(t.nbytes for t in engine.shapes().values())
            if (room := storage.room()) is not None and room < size:
                checkpoint.make_room(storage, done, s.keep_last, best, size)
            self.saving = shards.Saving(engine, storage, meta, marks)
            prune = partial(checkpoint.prune, storage, done, s.keep_last, best, marks)
            self.after = [prune, then]
            return
        self.last = checkpoint.keep(storage, engine.state(), meta, marks, s.keep_last, best)
        then()

    def settle(self, wait: bool) -> None:
        """Commit the checkpoint that actors are writing, once it is whole."""
        saving = self.saving
        if saving is None or not saving.arrived(wait):
            return
        self.saving, self.last = None, saving.commit()
        for action in self.after:
            action()

    def way_on(self) -> str:
        """What a user needs to know whose run has lost its ground."""
        assert self.folder is not None
        command = self.folder.command or this_command()
        return f"last checkpoint: {self.last or 'none yet'}; this continues: {command}"

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Whatever ends the run says which checkpoint is left of it."""
        try:
            yield
        except TrainingError as e:
            raise TrainingError(f"{e}; last checkpoint: {self.last or 'none yet'}") from e
        except BrokenPipeError:  # who read our output has gone: no failure of the run
            raise
        except OSError as e:  # a full or lost disk
            reason = " ".join(str(e).split())
            raise TrainingError(f"{reason}; last checkpoint: {self.last or 'none yet'}") from e
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self.last) from None
        except Terminated:
            raise Terminated(self.last) from None
