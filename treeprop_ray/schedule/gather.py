"""Fewer calls for hosts that serve several nodes: a host goes on where it need not wait.

Waves are level by level. A host that holds a whole subtree has no reason to stop there: nobody
waits for what it makes inside, and the next level needs nothing from outside. N = 8 on two hosts,
nodes 2, 1, 3 on host 1; what arrives stands above a call, what leaves below it:

    by level     z0      z4                       gathered     z0         z4
                 F2  |   FB1 FB3 A2   |   B2                   F2 FB1  |  FB3 A2 B2
                                          l2 r2                           l2 r2

So node 1 does not wait for z4, and two calls do what three did.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treeprop_ray.schedule.ops import Op, Row


FIXED = ("head", "close", "share", "collect")  # verbs that keep their clock


def gather(rows: list[Row]) -> list[Row]:
    """Move the ops of a node into its host's call before, if that sends nothing and has all that
    they read. Head and stem keep their clock: they may share weights, whose gradients must be
    summed in one order, wherever the nodes live."""
    readers: dict[str, set[int]] = {}
    for *_, by_host in rows:
        for host, ops in by_host.items():
            for name in (name for op in ops for name in op.reads):
                readers.setdefault(name, set()).add(host)

    def sends(call: list[Op], host: int) -> bool:
        return any(readers.get(name, set()) - {host} for op in call for name in op.writes)

    before: dict[int, list[Op]] = {}  # the last call of each host
    held: dict[int, set[str]] = {}  # what a host has made or received by then
    out: list[Row] = []
    for clock, phase, level, by_host in rows:
        kept: dict[int, list[Op]] = {}
        for host, ops in by_host.items():
            call, have = before.get(host), held.setdefault(host, set())
            goes_on = call is not None and not sends(call, host)
            stay: list[Op] = []
            for _, group in itertools.groupby(ops, key=lambda op: op.n):
                mine = list(group)
                made = {name for op in mine for name in op.writes}
                here = {name for op in mine for name in op.reads} <= have | made
                free = not any(op.verb.startswith(FIXED) for op in mine)
                if call is not None and goes_on and here and free:
                    call += mine
                    have |= made
                else:
                    stay += mine
            if stay:
                kept[host] = before[host] = stay
                have.update(name for op in stay for name in (*op.reads, *op.writes))
        if kept:
            out.append((clock, phase, level, kept))
    return out
