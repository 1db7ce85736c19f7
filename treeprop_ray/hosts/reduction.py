"""Gradients that copies of a host add up together, in the order in which one process would.

A parameter's gradient is a sum of terms: one for each piece of the batch, several for the head,
which many nodes ask. A host that has copies keeps its terms apart, each with its rank: the place in
the step of the op it came from. Then every copy adds up a share of all numbers:

    copy 0   terms ──┬─ share 0 ──►  sorted by rank, added up ──┬──►  all sums
                     └─ share 1 ─┐                              │
    copy 1   terms ──┬─ share 0 ─┘►  …                          ├──►  all sums
                     └─ share 1 ──►  sorted by rank, added up ──┘

Each number crosses twice, whatever the number of copies. With shards a share is made of whole
parameters, its sums stay where they are, and after the update the weights cross instead. With
`exact=False` gradients stay where they are made, for an all-reduce (copied.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from treeprop_ray.schedule.copies import Copy

# ranks of the terms of each segment of a share, and their numbers one after the other, by type
Packet = tuple[tuple[tuple[int, ...], ...], dict[str, Tensor]]
Segment = tuple[str, int, int]  # a parameter, and a run of its numbers


class Reduction:
    """The terms of a step's gradients in one copy of a host."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], copy: Copy) -> None:
        self.parameters, self.copy = parameters, copy
        sizes = {k: p.numel() for k, p in parameters.items()}
        self.shares = (whole_shares if copy.shards else shares)(sizes, copy.of)
        self.rank: int | None = None  # of the op under way; None: gradients stay where they are
        self.terms: dict[str, list[tuple[int, Tensor]]] = {}
        self.own: Packet | None = None  # of its own share
        if copy.exact:
            for name, p in parameters.items():
                p.register_post_accumulate_grad_hook(self._note(name))

    def _note(self, name: str) -> Callable[[Tensor], None]:
        """Take a term out of a parameter as soon as it is there."""

        def note(parameter: Tensor) -> None:
            if self.rank is not None:
                assert parameter.grad is not None
                self.terms.setdefault(name, []).append((self.rank, parameter.grad))
                parameter.grad = None

        return note

    @contextmanager
    def at(self, rank: int | None) -> Iterator[None]:
        """What is added to gradients inside belongs to the op with this rank."""
        before, self.rank = self.rank, rank
        try:
            yield
        finally:
            self.rank = before

    def kept(self, rest: Callable[[], None]) -> Callable[[], None]:
        """Something that is done later, for the op under way."""
        rank = self.rank

        def later() -> None:
            with self.at(rank):
                rest()

        return later

    def forget(self) -> None:
        """Drop the terms of a step that was under way."""
        self.terms.clear()
        self.own = None

    def hand_out(self) -> list[Packet | None]:
        """What each copy needs of the terms here; the own share stays here."""
        packets: list[Packet | None] = [packed(share, self.terms) for share in self.shares]
        self.terms.clear()
        self.own, packets[self.copy.index] = packets[self.copy.index], None
        return packets

    def add_up(self, others: Sequence[Packet]) -> Packet:
        """The sums of the own share, from the terms of all copies."""
        assert self.own is not None
        mine, self.own = self.own, None
        share = self.shares[self.copy.index]
        terms: dict[Segment, list[tuple[int, Tensor]]] = {}
        for packet in (mine, *others):
            for segment, rank, t in unpacked(share, packet, self.parameters):
                terms.setdefault(segment, []).append((rank, t))
        sums: dict[str, list[tuple[int, Tensor]]] = {}
        for segment in share:
            if ordered := sorted(terms.get(segment, []), key=lambda term: term[0]):
                total = ordered[0][1].clone()
                for _, t in ordered[1:]:
                    total += t
                sums[segment[0]] = [(0, total)]
        self.own = packed([(name, 0, stop - start) for name, start, stop in share], sums)
        return self.own

    def take(self, others: Sequence[Packet]) -> None:
        """Make the sums of the own share and of the `others`, in the order of the copies, the
        gradients."""
        assert self.own is not None
        mine, self.own = self.own, None
        flat: dict[str, Tensor] = {}
        for share, packet in [(self.shares[self.copy.index], mine), *self._of(others)]:
            for (name, start, stop), _, t in unpacked(share, packet, self.parameters):
                p = self.parameters[name]
                if name not in flat:
                    flat[name] = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
                flat[name][start:stop] = t
        for name, numbers in flat.items():
            p = self.parameters[name]
            whole = numbers.view(p.shape)
            p.grad = whole if p.is_contiguous() else torch.empty_like(p).copy_(whole)

    def _of(self, others: Sequence[Packet]) -> list[tuple[Sequence[Segment], Packet]]:
        """What the other copies gave, with their shares."""
        shares = [share for k, share in enumerate(self.shares) if k != self.copy.index]
        return list(zip(shares, others, strict=True)) if others else []

    # -- with shards --------------------------------------------------------------------------

    @property
    def mine(self) -> set[str]:
        """The parameters that this copy updates."""
        return {name for name, _, _ in self.shares[self.copy.index]}

    def weights(self) -> Packet:
        """The parameters that this copy has updated."""
        terms = {name: [(0, self.parameters[name].detach())] for name in self.mine}
        return packed(self.shares[self.copy.index], terms)

    @torch.no_grad()
    def renew(self, others: Sequence[Packet]) -> None:
        """Take over the parameters that the other copies have updated."""
        for share, packet in self._of(others):
            for (name, _, _), _, t in unpacked(share, packet, self.parameters):
                p = self.parameters[name]
                p.copy_(t.view(p.shape))


def shares(sizes: Mapping[str, int], copies: int) -> list[list[Segment]]:
    """All numbers of all parameters, in equal runs, one for each copy."""
    total = sum(sizes.values())
    bounds = [total * k // copies for k in range(copies + 1)]
    out: list[list[Segment]] = [[] for _ in range(copies)]
    begin = 0
    for name, size in sizes.items():
        for k in range(copies):
            start, stop = max(bounds[k], begin), min(bounds[k + 1], begin + size)
            if start < stop:
                out[k].append((name, start - begin, stop - begin))
        begin += size
    return out


def whole_shares(sizes: Mapping[str, int], copies: int) -> list[list[Segment]]:
    """Whole parameters, which is what an optimizer wants: the largest first, to whom has least."""
    loads, owner = [0] * copies, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner[name] = k = loads.index(min(loads))
        loads[k] += sizes[name]
    return [[(n, 0, size) for n, size in sizes.items() if owner[n] == k] for k in range(copies)]


def packed(share: Sequence[Segment], terms: Mapping[str, Sequence[tuple[int, Tensor]]]) -> Packet:
    """The terms of a share's segments."""
    flat: dict[str, list[Tensor]] = {}
    for name, start, stop in share:
        for _, t in terms.get(name, ()):
            flat.setdefault(str(t.dtype), []).append(t.reshape(-1)[start:stop])
    ranks = tuple(tuple(rank for rank, _ in terms.get(name, ())) for name, _, _ in share)
    return ranks, {kind: torch.cat(parts) for kind, parts in flat.items()}


def unpacked(
    share: Sequence[Segment], packet: Packet, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[Segment, int, Tensor]]:
    """(segment, rank, numbers) of every term in a packet."""
    ranks, flat = packet
    at = dict.fromkeys(flat, 0)
    for segment, of_segment in zip(share, ranks, strict=True):
        name, start, stop = segment
        p = parameters[name]
        kind, size = str(p.dtype), stop - start
        for rank in of_segment:
            yield segment, rank, flat[kind][at[kind] : at[kind] + size].to(p.device)
            at[kind] += size
