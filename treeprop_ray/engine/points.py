"""Recovery points: the state of all actors after one common step, kept where the actors are.

The driver holds references and names, never tensors. Each actor's state stays in the object store of
its own machine, and another actor on another machine, where there is one, keeps it too:

    machine 0   actor 0 ── state 0 ─┐      keeps state 2
    machine 1   actor 1 ── state 1 ─┼─┐    keeps state 0 ◄─┘
    machine 2   actor 2 ── state 2 ─┘ └─►  keeps state 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from treeprop_ray.engine import transport
from treeprop_ray.hosts.base import Host, State

Read = Callable[[Host], None]  # has a host take up its parts of a stored state


@dataclass
class Point:
    """References to the states of actors, or how a host reads a state that is stored."""

    names: list[Any] = field(default_factory=list)  # for each state the parts that are in it
    states: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # answers of those who keep another's state
    read: Read | None = None

    @classmethod
    def taken(cls, actors: Sequence[Any], keepers: Sequence[int | None], step: int) -> Point:
        """Ask all actors for their states, behind the calls that are submitted."""
        pairs = [actor.state.options(num_returns=2).remote() for actor in actors]
        names, states = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        kept = [
            actors[keeper].keep.remote(step, state)
            for keeper, state in zip(keepers, states, strict=True)
            if keeper is not None
        ]
        return cls(names, states, kept)

    @classmethod
    def of(cls, state: State) -> Point:
        """A state that is at hand."""
        parts = {key.partition("/")[0] for part in state for key in part}
        return cls([ray.put(tuple(parts))], [ray.put(transport.leaving(state))])

    def arrived(self) -> bool:
        """Whether every state is there, and kept; nothing is fetched."""
        refs = [*self.names, *self.states, *self.kept]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return len(ready) == len(refs)

    def load(self, actors: Sequence[Any]) -> list[Any]:
        """Have all actors take up their parts; their answers."""
        if self.read is not None:
            return [actor.take_up.remote(self.read) for actor in actors]
        return [actor.load.remote(self.names, self.states) for actor in actors]


def keepers(machines: Sequence[str]) -> list[int | None]:
    """For each actor the next one on another machine; None where there is only one machine."""
    count = len(machines)
    return [
        next((j % count for j in range(i + 1, i + count) if machines[j % count] != at), None)
        for i, at in enumerate(machines)
    ]
