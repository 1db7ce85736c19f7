"""Recovery points: the state of all actors after one common step, kept where the actors are.

The driver holds references and names, no tensors. Each actor's state stays in the object store of
its own machine, and another actor on another machine, where there is one, keeps it too:

    machine 0   actor 0 ── state 0 ─┐      keeps state 2
    machine 1   actor 1 ── state 1 ─┼─┐    keeps state 0 ◄─┘
    machine 2   actor 2 ── state 2 ─┘ └─►  keeps state 1

Copies of a host (replicas=) have the same state: then nothing need travel, and a lost actor takes
what its twin has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError
from torch import Tensor

from treeprop_ray.engine import transport
from treeprop_ray.hosts.base import Host, State

Read = Callable[[Host], None]  # has a host take up its parts of a stored state


@dataclass
class Point:
    """References to the states of actors, or how a host reads a state that is stored."""

    names: list[Any] = field(default_factory=list)  # for each state the parts that are in it
    states: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # answers of those who keep another's state
    whole: bool = False  # each state is all there is about its parts
    read: Read | None = None

    @classmethod
    def taken(
        cls,
        actors: Sequence[Any],
        keepers: Sequence[int | None],
        step: int | None = None,
        since: int = 0,
        own: bool = False,
    ) -> Point:
        """Ask all actors for their states, behind the calls that are submitted; `own`: each for all
        that it has; `step`: as they are before it. Earlier ones are kept from `since` on."""
        pairs = [actor.state.options(num_returns=2).remote(own, step) for actor in actors]
        names, states = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        kept = [
            actors[keeper].keep.remote(step, state, since)
            for keeper, state in zip(keepers, states, strict=True)
            if keeper is not None
        ]
        return cls(names, states, kept, own)

    @classmethod
    def of(cls, state: State) -> Point:
        """A state that is at hand."""
        parts = {key.partition("/")[0] for part in state for key in part}
        return cls([ray.put(tuple(parts))], [ray.put(transport.leaving(state))])

    @classmethod
    def recalled(cls, actors: Sequence[Any], step: int, whole: bool) -> Point:
        """States of actors as they were before a step to which all of them can go back."""
        pairs = [actor.recall.options(num_returns=2).remote(step) for actor in actors]
        return cls([pair[0] for pair in pairs], [pair[1] for pair in pairs], whole=whole)

    def arrived(self) -> bool:
        """Whether every state is there, and kept; nothing is fetched."""
        refs = [*self.names, *self.states, *self.kept]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return len(ready) == len(refs)

    def without(self, lost: Collection[int], hosts: int) -> Point | None:
        """What is left of a point under way when some actors are gone: states of at least one copy
        of each of the `hosts`; None if that is not all there is."""
        there = [k for k in range(len(self.names)) if k not in lost and _is_there(self.names[k])]
        if not self.whole or {k % hosts for k in there} != set(range(hosts)):
            return None
        names, states = ([refs[k] for k in there] for refs in (self.names, self.states))
        return Point(names, states, self.kept, whole=True)

    def load(self, actors: Sequence[Any], step: int) -> list[Any]:
        """Have all actors take up their parts, as they were before `step`; their answers."""
        if self.read is not None:
            return [actor.take_up.remote(self.read, step) for actor in actors]
        return [actor.load.remote(self, index, step) for index, actor in enumerate(actors)]

    def state_of(self, parts: Collection[str], index: int) -> State:
        """In the actor `index`: what the point has of some parts. Of states that are whole it takes
        its own first, which is on this machine, then a twin's."""
        held = list(enumerate(ray.get(list(self.names))))
        held.sort(key=lambda entry: entry[0] != index)
        weights: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        told = {part for _, inside in held for part in inside}  # others have nothing to tell
        missing, lost = set(parts) & told, None
        for k, inside in held:
            if not (missing if self.whole else set(parts)) & set(inside):
                continue
            try:
                of_weights, of_optimizer = transport.arriving(ray.get(self.states[k]))
            except ObjectLostError as e:  # with its machine; a twin may have it
                lost = e
                continue
            weights.update(of_weights)
            optimizer.update(of_optimizer)
            missing -= {key.partition("/")[0] for key in of_weights}
        if lost and (missing or not self.whole):
            raise lost
        return weights, optimizer


def _is_there(ref: Any) -> bool:
    """Whether a call has ended, and well."""
    try:
        ray.get(ref, timeout=0)
    except (RayError, GetTimeoutError):
        return False
    return True


def keepers(machines: Sequence[str], hosts: int = 0) -> list[int | None]:
    """For each actor the next one on another machine; None where there is only one machine, or
    where every `hosts`-th actor has the same state, and one of them is on another machine."""
    count = len(machines)
    out: list[int | None] = []
    for i, at in enumerate(machines):
        twins = machines[i % hosts :: hosts] if hosts else []
        others = (j % count for j in range(i + 1, i + count) if machines[j % count] != at)
        out.append(None if any(twin != at for twin in twins) else next(others, None))
    return out
