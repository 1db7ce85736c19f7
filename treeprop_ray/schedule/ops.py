"""What a schedule is made of: ops, calls of hosts, and the layout. Pure Python, no torch, no Ray.

A schedule is a list of calls in the order in which they are submitted; each host runs its own in
that order. `make_calls` finds out which tensors travel, `interleave` lets the pieces of a batch
follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from treeprop_ray.core.tree import Tree

STEP = "tree"  # the method's own step among the passes over the hosts


@dataclass(frozen=True)
class Op:
    """One thing a node, the stem or the head does: a method of TreeNode or Boundary."""

    verb: str  # open | lift | answer | head | receive | settle | backward | close | …
    # with copies of the head: share | head_noted | head_copy | collect | close_noted
    n: int
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of one host: the ops of all its nodes of `level`, for one piece of the batch.

    inputs come from other hosts; packets hold what other hosts need, tensors with the same
    readers together. What stays inside a host is not listed.
    """

    phase: str  # stem | forward | head | settle | again | aside | backward | stem_backward
    level: int
    host: int
    piece: int
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    packets: tuple[tuple[str, ...], ...]
    last: bool  # the host's last call for this piece: it may forget the piece's tensors
    order: int = 0  # with copies: how many ops of the step one process would do here before

    @property
    def outputs(self) -> list[str]:
        """All tensors that travel."""
        return [name for packet in self.packets for name in packet]

    @property
    def nodes(self) -> list[int]:
        """The nodes served, in order."""
        return list(dict.fromkeys(op.n for op in self.ops if op.verb not in ("open", "close")))


@dataclass(frozen=True)
class Layout:
    """Where the nodes live (`host_of`), and where stem, head and labels do (`boundary`)."""

    host_of: Mapping[int, int]
    boundary: int = 0
    one_machine: bool = False  # shared memory: a call's tensors travel as one packet
    heads: Mapping[int, int] = field(default_factory=dict)  # spine node -> host of a copy

    @property
    def hosts(self) -> list[int]:
        return sorted({self.boundary, *self.host_of.values(), *self.heads.values()})

    @classmethod
    def single(cls, tree: Tree) -> Layout:
        """Everything in one host."""
        return cls(dict.fromkeys(tree.nodes, 0))


Row = tuple[int, str, int, dict[int, list[Op]]]  # (clock, phase, level, ops by host)
Wave = tuple[int, list[Call]]  # (clock, calls that do not depend on each other)


def make_calls(waves: list[Row], piece: int, one_machine: bool = False) -> list[Wave]:
    """Make calls of (clock, phase, level, ops by host); a tensor travels only if another host
    reads it. Tensors with the same readers share a packet; on one machine all of a call do, since
    fewer objects cost less there and what a reader does not need is not copied."""
    rows = [(host, ops) for *_, by_host in waves for host, ops in by_host.items()]
    maker = {name: host for host, ops in rows for op in ops for name in op.writes}
    readers: dict[str, set[int]] = {}
    for host, ops in rows:
        for op in ops:
            for name in op.reads:
                readers.setdefault(name, set()).add(host)
    final = {host: id(ops) for host, ops in rows}
    fellows: dict[str, tuple[str, ...]] = {}  # the packet of a tensor
    arrived: set[tuple[int, str]] = set()  # a host keeps what it has received for later calls
    out = []
    for clock, phase, level, by_host in waves:
        calls = []
        for host, ops in by_host.items():
            reads = dict.fromkeys(name for op in ops for name in op.reads)
            inputs = []
            for name in reads:
                if maker[name] != host and (host, name) not in arrived:
                    inputs.append(name)
                    arrived.update((host, fellow) for fellow in fellows[name])
            groups: dict[frozenset[int], list[str]] = {}
            for name in (name for op in ops for name in op.writes):
                if others := readers.get(name, set()) - {host}:
                    key = frozenset() if one_machine else frozenset(others)
                    groups.setdefault(key, []).append(name)
            packets = tuple(tuple(group) for group in groups.values())
            fellows.update({name: packet for packet in packets for name in packet})
            last = final[host] == id(ops)
            calls.append(Call(phase, level, host, piece, tuple(ops), tuple(inputs), packets, last))
        out.append((clock, calls))
    return out


def alike(first: list[Wave], pieces: int) -> list[list[Wave]]:
    """The waves of all pieces, which do what the first one does."""
    rest = [
        [(clock, [replace(call, piece=m) for call in calls]) for clock, calls in first]
        for m in range(1, pieces)
    ]
    return [first, *rest]


def interleave(pieces: list[list[Wave]], stride: int) -> list[Call]:
    """All calls of a step in the order in which they are submitted.

    Piece m enters `stride` ticks after piece m - 1, so different levels work at the same time;
    where two pieces meet on one host the earlier one, which is on its way back, goes first.
    """
    keyed = [
        (clock + stride * m, m, call)
        for m, waves in enumerate(pieces)
        for clock, calls in waves
        for call in calls
    ]
    keyed.sort(key=lambda entry: entry[:2])
    return [call for _, _, call in keyed]
