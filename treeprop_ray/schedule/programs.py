"""Each host's part of a schedule, for hosts that run it by themselves. Pure Python.

A host's program lists its calls in order, what each takes from whom and gives to whom; both sides
of a connection know the order of its packets, so these need no names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeprop_ray.schedule.ops import Call

Key = tuple[int, tuple[str, ...]]  # piece and names of a packet


@dataclass(frozen=True)
class Turn:
    """A call of a host: what it takes from others before, and gives to others after."""

    call: Call
    takes: tuple[tuple[int, Key], ...]  # (host, packet)
    gives: tuple[tuple[int, Key], ...]


@dataclass(frozen=True)
class Program:
    """A host's turns in one pass, and the order in which packets of each other host arrive."""

    turns: tuple[Turn, ...]
    arrivals: Mapping[int, tuple[Key, ...]]


def programs(calls: Sequence[Call], hosts: int) -> list[Program]:
    """What each host does in a pass of the schedule. A call sends each reader one packet, with the
    tensors that this one reads; it is taken by the reader's first call that needs any of them."""
    readers: dict[tuple[int, str], set[int]] = {}
    for call in calls:
        for name in (name for op in call.ops for name in op.reads):
            readers.setdefault((call.piece, name), set()).add(call.host)
    under_way: dict[tuple[int, int, str], tuple[int, Key]] = {}  # (reader, piece, name) -> packet
    turns: list[list[Turn]] = [[] for _ in range(hosts)]
    arrivals: list[dict[int, list[Key]]] = [{} for _ in range(hosts)]
    for call in calls:
        takes: list[tuple[int, Key]] = []
        for name in (name for op in call.ops for name in op.reads):
            packet = under_way.get((call.host, call.piece, name))
            if packet:
                takes.append(packet)
                for fellow in packet[1][1]:
                    del under_way[call.host, call.piece, fellow]
        by_reader: dict[int, list[str]] = {}
        for name in call.outputs:
            for reader in readers.get((call.piece, name), set()) - {call.host}:
                by_reader.setdefault(reader, []).append(name)
        gives = []
        for reader, names in sorted(by_reader.items()):
            key = (call.piece, tuple(names))
            under_way |= {(reader, call.piece, name): (call.host, key) for name in names}
            gives.append((reader, key))
            arrivals[reader].setdefault(call.host, []).append(key)
        turns[call.host].append(Turn(call, tuple(takes), tuple(gives)))
    return [
        Program(tuple(mine), {host: tuple(keys) for host, keys in here.items()})
        for mine, here in zip(turns, arrivals, strict=True)
    ]
