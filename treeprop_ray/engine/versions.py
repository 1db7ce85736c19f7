"""The states that an actor can go back to: those before its last steps, in its own memory.

Actors are not all at the same step, but never far apart. When one is lost, the others go back to
the newest step that all of them can bring back, and the new one takes what its twin has of it:

    copy 0   host 0   version 5   6   7   now 8          lost: host 1 of copy 0
             host 1   X
    copy 1   host 2   version 4   5   6   now 7          all go on from 7: host 1 with what
             host 3   version 4   5   6   now 7          host 3 has

With shards a copy has slots of its own; the next copy holds them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from treeprop_ray.hosts.base import State

Slots = dict[str, Tensor]


class Reach(NamedTuple):
    """How far an actor is, the steps whose beginning it can go back to, and those of which it has
    the slots of the copy before it."""

    done: int
    steps: tuple[int, ...]
    fostered: tuple[int, ...] = ()


class Versions:
    """The last states of a host, in memory that is used again."""

    def __init__(self, most: int, step: int = 0, stands: Slots | None = None) -> None:
        """The host is before `step`, and the stream that it reads, if it does, `stands` there."""
        self.most = most
        self.states: dict[int, State] = {}  # as they were before a step
        self.stood: dict[int, Slots] = {step: stands or {}}  # the stream, before it gave a batch
        self.fostered: dict[int, Slots] = {}  # with shards: slots of the copy before this one
        self.held: int | None = None  # one that stays: of a checkpoint that is being written

    def keep(self, step: int, now: State) -> None:
        """Copy a state that is about to change."""
        spare: State = ({}, {})
        while len(old := [s for s in self.states if s != self.held]) >= self.most:
            spare = self.states.pop(min(old))
        weights, slots = (_copied(t, old) for t, old in zip(now, spare, strict=True))
        self.states[step] = weights, slots

    def ended(self, step: int, stands: Slots) -> None:
        """A step is done, and the batch of the next one not read yet."""
        self.stood[step + 1] = stands
        self.stood = self._recent(self.stood, step)

    def foster(self, step: int, slots: Slots) -> None:
        """What the copy before this one has after a step."""
        self.fostered[step + 1] = slots
        self.fostered = self._recent(self.fostered, step)

    def _recent(self, kept: dict[int, Slots], step: int) -> dict[int, Slots]:
        return {s: slots for s, slots in kept.items() if s > step - self.most or s == self.held}

    def before(self, step: int, now: Callable[[], State]) -> State:
        """What was kept of a step, or what is there now."""
        weights, slots = self.states.get(step) or now()
        return weights, slots | self.stood[step] | self.fostered.get(step, {})


def _copied(tensors: Mapping[str, Tensor], spare: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, in the memory of earlier ones if they are alike: new pages cost more than a copy."""
    out = {}
    for name, t in tensors.items():
        old = spare.get(name)
        fits = old is not None and (old.shape, old.dtype) == (t.shape, t.dtype)
        out[name] = old.copy_(t) if old is not None and fits else t.detach().cpu().clone()
    return out


def common(told: Mapping[int, Reach], hosts: int, until: int | None, actors: int = 0) -> int | None:
    """The newest step, at most `until`, to which one copy of every host can go back. With shards
    `actors` says how many there were: the slots of each are needed."""
    needed: list[set[int]] = [set() for _ in range(hosts + actors)]
    for index, reach in told.items():
        needed[index % hosts].update(reach.steps)
        if actors:
            needed[hosts + index].update(reach.steps)
            needed[hosts + (index - hosts) % actors].update(set(reach.fostered) & set(reach.steps))
    steps = [s for s in set.intersection(*needed) if until is None or s <= until]
    return max(steps, default=None)


def begun(told: Mapping[int, Reach]) -> Sequence[int]:
    """The steps that those who live have begun."""
    return range(max((reach.done + 1 for reach in told.values()), default=0))
