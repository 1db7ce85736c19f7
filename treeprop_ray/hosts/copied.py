"""What a host does that has copies (replicas=): hand out its gradients, add up, take the sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from treeprop_ray.core.node import Losses
from treeprop_ray.core.optim import PartOptimizer
from treeprop_ray.core.rule import Piece
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.reduction import Packet, Reduction
from treeprop_ray.schedule.copies import Copy

Terms = dict[int, dict[str, tuple[Tensor, ...]]]  # losses by place and name: one for each piece
HandedOut = tuple[Packet | None, Terms]  # what a copy gets of another
Added = tuple[Packet | None, dict[str, float]]  # sums of a share, or the norms of its gradients


class Group(Protocol):
    """All copies of a host at once (reduce=fast)."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make tensors the sums over all copies."""


class Copied:
    """The part of a host that is about its copies; alone it has nothing to do."""

    parts: Mapping[str, nn.Module]
    optimizer: PartOptimizer
    device: torch.device
    losses: dict[int, Losses]
    catch_up: Callable[[], None]  # what earlier calls have left for later
    reduction: Reduction | None = None
    group: Group | None = None  # without it sums are in the order of one process

    def begin_copy(self, copy: Copy) -> None:
        """Which copy this is; from the start."""
        self.copy = copy
        if copy.of > 1:
            self.reduction = Reduction(self.optimizer.named, copy)
            if copy.shards:
                self.optimizer.only(self.reduction.mine)
        self.versions = self._versions()

    @property
    def weight(self) -> int:
        """Bytes of all trained parameters here; the same for all copies of a host."""
        return sum(p.numel() * p.element_size() for p in self.optimizer.named.values())

    def note(self, place: int, name: str, value: Tensor) -> None:
        """Add a loss term of a piece to that of the step."""
        self.losses.setdefault(place, Losses()).add(name, value)

    def noting(self, rank: int, piece: Piece) -> contextlib.AbstractContextManager[object]:
        """With copies, and in training: gradients inside are terms of this rank."""
        if self.reduction and piece.held is None:
            return self.reduction.at(rank)
        return contextlib.nullcontext()

    def hand_out(self) -> list[HandedOut]:
        """What each copy of this host needs to add up its share; the first has the losses too."""
        assert self.reduction is not None
        self.catch_up()
        for name, version in self._versions().items():
            if version != self.versions[name]:
                raise UserError(
                    f"replicas={self.copy.of}: {name} changes while the network trains (running "
                    "statistics?), and copies would not agree on it; use replicas=1"
                )
        losses: Terms = {}
        if self.copy.index > 0:
            taken = {place: losses.take_pieces() for place, losses in self.losses.items()}
            losses = {place: terms for place, terms in taken.items() if terms}
        packets = self.reduction.hand_out() if self.copy.exact else [None] * self.copy.of
        return [(packet, {} if k else losses) for k, packet in enumerate(packets)]

    def _versions(self) -> dict[str, int]:
        """How often each buffer was written to; of a host with copies."""
        if self.copy.of == 1:
            return {}
        named = [(n, k, b) for n, m in self.parts.items() for k, b in m.named_buffers()]
        return {f"buffer {k} of block {n}": b._version for n, k, b in named}

    def add_up(self, others: Sequence[HandedOut]) -> Added:
        """The sums of the own share, or with shards their norms; what the others gave is in the
        order of the copies."""
        assert self.reduction is not None
        for _, losses in others:
            for place, terms in losses.items():
                for name, values in terms.items():
                    for value in values:
                        self.note(place, name, value.to(self.device))
        if self.copy.exact:
            sums = self.reduction.add_up([packet for packet, _ in others if packet])
            if not self.copy.shards:
                return sums, {}
            self.reduction.take([])
        else:
            self._add_up_at_once()
            if not self.copy.shards:
                return None, {}
        self.optimizer.norms = norms = self.optimizer.norms_here()
        return None, norms

    def take(self, others: Sequence[Added]) -> None:
        """The sums of the other copies' shares, or their norms, in the order of the copies."""
        assert self.reduction is not None
        if self.copy.shards:
            assert self.optimizer.norms is not None
            for _, norms in others:
                self.optimizer.norms |= norms
        elif self.copy.exact:
            self.reduction.take([sums for sums, _ in others if sums])

    def _add_up_at_once(self) -> None:
        """Gradients become the sums over all copies; with shards those of others are dropped."""
        assert self.group is not None and self.reduction is not None
        named = self.optimizer.named
        self.group.add_up([p.grad for p in named.values() if p.grad is not None])
        for name in named.keys() - self.reduction.mine if self.copy.shards else ():
            named[name].grad = None

    def weights_out(self) -> Packet:
        """With shards: what this copy has updated."""
        assert self.reduction is not None
        self.catch_up()
        return self.reduction.weights()

    def slots_out(self) -> dict[str, Tensor]:
        """With shards: the state of the optimizer for what this copy has updated."""
        self.catch_up()
        return {key: value.clone() for key, value in self.optimizer.state().items()}

    def renew(self, others: Sequence[Packet]) -> None:
        """With shards: what the other copies have updated, in the order of the copies."""
        assert self.reduction is not None
        self.reduction.renew(others)
