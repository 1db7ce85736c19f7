"""Reading ahead in a thread, with random draws that depend on named seeds alone.

A user's samples may draw random numbers when they are read (crops, flips, the order of a loader).
The thread that reads must not disturb torch's global generator, from which blocks draw their
dropout; so inside `drawing` every draw that names no generator is given one of our own. Python's
and numpy's generators are seeded too, and put back.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Batch = TypeVar("Batch")

DEPTH = 2  # batches that are read ahead

DRAWS: set[Any] = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal,
    torch.multinomial, torch.poisson, Tensor.bernoulli, Tensor.multinomial, Tensor.random_,
    Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.exponential_, Tensor.geometric_,
    Tensor.log_normal_, Tensor.cauchy_,
}  # fmt: skip

_lock = threading.RLock()  # Python's and numpy's generators are the process's: one reader at a time


class _OwnDraws(TorchFunctionMode):
    """In this thread, torch's draws come from a generator of our own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


def _states(own: _OwnDraws) -> tuple[Any, ...]:
    """Where all generators stand."""
    _, words, *where = np.random.get_state()
    torchs = own.generator.get_state().numpy().tobytes()
    return random.getstate(), (np.asarray(words).tobytes(), *where), torchs


@contextmanager
def drawing(seed: int) -> Iterator[Callable[[], bool]]:
    """Whatever is drawn inside, by torch, numpy or Python, is a function of `seed`.

    What it gives tells, afterwards too, whether anything was drawn.
    """
    drawn: list[bool] = []
    with _lock:
        before, numpy_before = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        own = _OwnDraws(seed)
        fresh = _states(own)
        try:
            with own:
                yield lambda: any(drawn)
        finally:
            drawn += [a != b for a, b in zip(fresh, _states(own), strict=True)]
            random.setstate(before)
            np.random.set_state(numpy_before)


class _Thread:
    """A thread that does one thing after the other.

    Not one of `ThreadPoolExecutor`'s: a process that is forked in such a thread, as a loader's
    workers are, waits for itself at its end and leaves as one that has failed.
    """

    def __init__(self, name: str) -> None:
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            task()
            del task  # with what it has read

    def submit(self, do: Callable[[], Batch]) -> Future[Batch]:
        """What it gives, in its turn."""
        future: Future[Batch] = Future()
        self.tasks.put(partial(self._done, future, do))
        return future

    @staticmethod
    def _done(future: Future[Batch], do: Callable[[], Batch]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(do())
            except BaseException as e:  # whoever asked is told
                future.set_exception(e)

    def close(self) -> None:
        """End it, after what it has to do."""
        self.tasks.put(None)
        self.thread.join()


class Ahead(Generic[Batch]):
    """Batches by step; while one is used, a thread reads the next `DEPTH`, up to step `last`."""

    def __init__(self, read: Callable[[int], Batch], last: int) -> None:
        self.read, self.last = read, last
        self.thread = _Thread("treeprop-reader")
        self.under_way: dict[int, Future[Batch]] = {}

    def __call__(self, step: int) -> Batch:
        """The batch of a step; waits until it is read."""
        wanted = range(step, max(step, min(step + DEPTH, self.last - 1)) + 1)
        self.under_way = {s: f for s, f in self.under_way.items() if s in wanted}
        for s in wanted:
            if s not in self.under_way:
                self.under_way[s] = self.thread.submit(partial(self.read, s))
        return self.under_way[step].result()

    def settle(self) -> None:
        """Let go of what was read ahead; the thread is idle after it."""
        for future in self.under_way.values():
            future.cancel()
        self.under_way.clear()
        self.thread.submit(int).result()

    def close(self) -> None:
        """End the thread."""
        self.settle()
        self.thread.close()
