"""Streams: samples that can only be read in order, and the batches of steps out of them.

The batch of step k is the k-th that is read. A step may be asked for again (a lost actor has its
steps replayed): the last batches are kept in memory, and before them the stream is read again, from
the state that it had or from its beginning. Where a stream stands is part of a run's state.
"""

from __future__ import annotations

import copy
import io
import logging
from collections import ChainMap
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from treeprop_ray.core.rng import derive
from treeprop_ray.core.rule import LossRule
from treeprop_ray.data.reading import DEPTH, drawing
from treeprop_ray.data.several import Several
from treeprop_ray.data.sources import (
    Columns,
    Split,
    as_tensor,
    batch_of_several,
    check_inputs,
    check_labels,
    collated,
    pair_of,
    targets,
)
from treeprop_ray.errors import UserError, first_line

STATE = "data/stream/state"  # where a stream stands, among the tensors of an optimizer's state
AT_ONCE = 1000  # samples that are read together where no batch size is given


def is_ray_data(source: Any) -> bool:
    """Whether this is a `ray.data.Dataset`; Ray is not imported for the question."""
    return type(source).__module__.startswith("ray.data") and hasattr(source, "iter_torch_batches")


class Stream:
    """A torch IterableDataset, a streaming Hugging Face set, a DataLoader, or Ray Data."""

    def __init__(
        self, source: Any, columns: Columns | None, batch: int, what: str, joined: int = 1
    ) -> None:
        """`batch`: the samples of a batch (0: whatever comes), `joined` of a loader's own."""
        self.source, self.columns, self.batch, self.what = source, columns, batch, what
        self.is_loader, self.runs_tasks = isinstance(source, DataLoader), is_ray_data(source)
        self.joined = joined if self.is_loader else 1
        self.size = batch // self.joined  # of what is read at once
        own = batch_of(source)
        if batch and own not in (None, self.size):
            raise UserError(f"batch={self.size}: {what} is a DataLoader with batches of {own}")
        self.has_state = (
            hasattr(source, "state_dict")
            and hasattr(source, "load_state_dict")
            and not _shuffles_in_a_buffer(source)
        )
        self.pristine = copy.deepcopy(source.state_dict()) if self.has_state else None
        self.example: Split | None = None
        self.classes, self.rule = 0, cast(LossRule | None, None)  # what labels must be, once known
        self.given = 0  # samples of the pass that is read, since it was opened
        with drawing(0), closing(self._parts()) as parts:
            first = next(parts, None)
        if first is None or not len(first):
            raise UserError(f"{what}: has no samples")
        self.example = first.take(slice(0, 1))
        if self.has_state:
            source.load_state_dict(copy.deepcopy(self.pristine))
        if getattr(source, "_iterator", None) is not None:
            source._iterator = None  # a DataLoader's persistent workers: they cannot travel

    def __len__(self) -> int:
        """Samples of a pass that come in whole batches; 0 where it is not known."""
        if self.runs_tasks:
            return 0  # to count its samples may mean to read them all
        try:
            if self.is_loader and self.source.batch_size is not None:
                count = len(self.source.sampler) // self.batch * self.batch
            else:
                count = len(self.source)
                count = count // self.joined * self.batch if self.is_loader else count
        except TypeError:
            return 0
        if not count:
            raise UserError(f"batch={self.size}: {self.what} has not as many samples in a pass")
        return count

    def open(self, epoch: int, state: Any = None) -> Generator[Split, None, None]:
        """The batches of a pass; from `state` on, if there is one."""
        things: list[Any] = [self.source, getattr(self.source, "sampler", None)]
        for thing in things:
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)
        if state is not None:
            self.source.load_state_dict(copy.deepcopy(state))
        return self._whole()

    def _whole(self) -> Generator[Split, None, None]:
        """Batches of the full size, less what is left over at the end of a pass."""
        whole = (part for part in self._parts() if len(part) == self.size)
        while len(parts := list(islice(whole, self.joined))) == self.joined:
            yield parts[0] if self.joined == 1 else joined_up(parts)

    def _parts(self) -> Generator[Split, None, None]:
        """Batches as they come; the last of a pass may be smaller."""
        size, self.given = self.size or AT_ONCE, 0
        if self.runs_tasks:
            self.source.context.execution_options.preserve_order = True
            self.source.context.enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.WARNING)  # a pass is no news
            logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
            batches = self.source.iter_torch_batches(batch_size=size)
            yield from map(self._split, batches)
        elif self.is_loader:
            yield from map(self._split, self.source)
        else:
            samples = iter(self.source)
            while part := list(islice(samples, size)):
                yield self._checked(collated(part, self.columns, self.what))

    def _split(self, batch: Any) -> Split:
        given, labels = pair_of(batch, self.columns, self.what)
        if isinstance(given, Several):
            return self._fits(batch_of_several(given, as_tensor(labels, self.what), self.what))
        x, y = as_tensor(given, self.what), as_tensor(labels, self.what)
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise UserError(
                f"{self.what}: a batch has inputs of shape {tuple(x.shape)} and labels of shape "
                f"{tuple(y.shape)}; must be of the same number"
            )
        return self._fits(Split(x, y))

    def _fits(self, part: Split) -> Split:
        if self.size and len(part) > self.size:
            raise UserError(f"batch={self.size}: {self.what} gave a batch of {len(part)}")
        return self._checked(part)

    def _checked(self, part: Split) -> Split:
        """The same structure as the first sample of all; what is wrong is told with its number."""
        if self.example is None:
            return part
        if self.example.form != part.form:
            if part.form is None:
                raise UserError(f"{self.what}: batches differ: one tensor, at first several")
            what = f"{self.what}: batches differ"
            part.form.check_same(self.example.form, what, "at first")
        numbers = range(self.given, self.given + len(part))
        self.given += len(part)
        for name in ("x", "y"):
            old, new = getattr(self.example, name), getattr(part, name)
            if (old.shape[1:], old.dtype) != (new.shape[1:], new.dtype):
                raise UserError(
                    f"{self.what}: batches differ: {name} has samples of shape "
                    f"{tuple(new.shape[1:])} {new.dtype}, at first {tuple(old.shape[1:])} "
                    f"{old.dtype}"
                )
        check_inputs(part, self.what, numbers)
        if self.rule:
            check_labels(targets(part.y), self.classes, self.what, self.rule, numbers=numbers)
        return part

    def state(self) -> Any:
        """The source's own state after what was read; None if it has none."""
        return copy.deepcopy(self.source.state_dict()) if self.has_state else None

    def whole(self, most: int) -> Split:
        """All samples in memory: for a held-out split, which is scored again and again."""
        parts, count = [], 0
        with drawing(0):
            for part in self._parts():
                parts.append(part)
                count += len(part)
                if count > most:
                    raise UserError(
                        f"{self.what}: a stream of more than {most} samples (or without an end); "
                        "take a part of it, or give a set that can be indexed"
                    )
        return joined_up(parts)


def batch_of(source: Any) -> int | None:
    """How many samples a loader's batches have, as far as it says so."""
    if not isinstance(source, DataLoader):
        return None
    sampler = source.batch_sampler
    return source.batch_size or cast(int | None, getattr(sampler, "batch_size", None))


def joined_up(parts: Sequence[Split]) -> Split:
    """Batches as one."""
    x, y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])
    return Split(x, y, parts[0].form)


def _shuffles_in_a_buffer(source: Any) -> bool:
    """Whether a Hugging Face stream has a shuffle buffer, whose content its state leaves out."""
    inner = [getattr(source, "_ex_iterable", None)]
    while inner:
        part = inner.pop()
        if "BufferShuffled" in type(part).__name__:
            return True
        if part is not None:
            inner += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", [])]
    return False


@dataclass(frozen=True)
class Position:
    """Where a stream stands before it gives the batch of step `next`."""

    next: int
    origin: int = 0  # the step that got the stream's first batch
    epoch: int = 0  # passes since
    state: Any = None  # the source's own; None at the beginning, or where it has none


class Reader:
    """The batches of a stream by step."""

    def __init__(self, stream: Stream, seed: int, keep: int) -> None:
        """`keep`: batches behind the one in use that stay in memory."""
        self.stream, self.seed, self.keep = stream, seed, keep + DEPTH + 1
        self.start = self.at = Position(0)
        self.passing: Generator[Split, None, None] | None = None  # the pass that is being read
        self.kept: dict[int, tuple[Split, Position]] = {}  # by step: batch, where it left us
        self.stands = self.start  # where training stands, behind what is read ahead

    def __call__(self, step: int) -> tuple[Split, Position]:
        """The batch of a step and where the stream stands after it."""
        if step not in self.kept:
            if step < self.at.next:
                self._go_to(self.start)
            while self.at.next <= step:
                self._read()
        return self.kept[step]

    def _go_to(self, position: Position) -> None:
        self.close()
        self.at = position

    def close(self) -> None:
        """Let go of the stream and of what was read of it."""
        if self.passing:
            self.passing.close()
        self.passing = None
        self.kept.clear()

    def _read(self) -> None:
        at, stream = self.at, self.stream
        with drawing(derive(self.seed, "stream", at.next)):
            try:
                if self.passing is None:
                    begins = at.state if at.state is not None else stream.pristine
                    self.passing = stream.open(at.epoch, begins)
                batch, epoch = next(self.passing, None), at.epoch
                if batch is None:
                    epoch += 1
                    self.passing = stream.open(epoch)
                    batch = next(self.passing, None)
                if batch is None:
                    raise UserError(f"{stream.what}: a pass has no whole batch of {stream.batch}")
            except UserError as e:
                taken_up = self.start.state is not None and at.epoch == self.start.epoch
                since = ", counted from where the stream was taken up" * taken_up
                raise UserError(f"{e} (batch of step {at.next}{since})") from e
            except Exception as e:  # the user's own code may raise anything
                reason = f"{type(e).__name__}: {first_line(e)}"
                raise UserError(f"{stream.what}: batch of step {at.next}: {reason}") from e
            self.at = Position(at.next + 1, at.origin, epoch, stream.state())
        self.kept[at.next] = batch, self.at
        for old in [s for s in self.kept if s <= at.next - self.keep]:
            del self.kept[old]

    def state(self) -> dict[str, Tensor]:
        """Where training stands in the stream, as a tensor."""
        return {STATE: packed(self.stands)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go back (or forth) to a state; what is still in memory is not read again."""
        if STATE not in state:
            return
        self.stands, before = unpacked(state[STATE]), self.start
        self.start = self.stands
        if not self.stream.has_state:  # it is read again from where it began
            self.start = Position(self.stands.origin, self.stands.origin)
        in_memory = self.stands.next in {self.at.next, *self.kept}
        if self.start.origin != before.origin or not in_memory:
            self._go_to(self.start)


def packed(position: Position) -> Tensor:
    """A position as bytes that a checkpoint can hold."""
    file = io.BytesIO()
    torch.save(asdict(position), file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(stored: Tensor) -> Position:
    """Back from `packed`."""
    file = io.BytesIO(stored.cpu().numpy().tobytes())
    return Position(**torch.load(file, weights_only=True))


def resumed(optimizer: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The state of a stored run as a new process takes it up: a stream without a state of its own
    starts anew."""
    if STATE not in optimizer:
        return optimizer
    position = unpacked(optimizer[STATE])
    if position.state is not None:
        return optimizer
    anew = replace(position, origin=position.next, epoch=0)
    return ChainMap({STATE: packed(anew)}, cast(dict[str, Tensor], optimizer))
