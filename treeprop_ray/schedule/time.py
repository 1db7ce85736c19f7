"""The calls of a step of TreeProp-TT on Ray, as data. Pure Python, no torch, no Ray.

One step of D = 3; a depth waits for nothing but the coarser states and the readout's answer:

    boundary   open      R2        R1        R0
    depth 2         A2        B2 U2
    depth 1              A1        B1 U1
    depth 0                   A0        B0 U0

A ahead, R readout's answer, B backward, U update (with global clipping all updates wait for all
norms). Tensors: x (the batch), s<d>.<j> (states after depth d), e<d> (h_N_hat), g<d> (its slope).

With `time.shards` a depth that has nodes enough is shared by several actors, each with a copy of
the cell and a window of the nodes:

    coarser states   0 . . . | 4 . . . | 8 . . . | 12 . . .     own nodes read the own states; the
    shard                0   |    1    |    2    |    3         last one's target f<d>.<j> is the
                                                                first state of the next window
At depth 0 a window reaches back over as many nodes as the sweeps look back. After the last piece
each gives its gradients (G<d>.<j>) to the others, and all add them up in the same order, so the
copies stay equal.

recipe=lookahead (lookahead.py, without shards): depth 0 has a roll in place of its nodes, and the
rest goes on after the tree; D = 6 with windows of 16:

    boundary   open          look                      v<d> the windows' ends after depth d,
    depth 4, 5     … jump jump    return return        a<d> the slope there
    depth 0        roll                      rolled
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeprop_ray.core.jumps import jumps, window_of
from treeprop_ray.schedule.ops import Call, Op

BOUNDARY = 0  # host 0 has data, labels and readout; the others have the cells


@dataclass(frozen=True)
class Window:
    """What one actor has of a depth: shard j of S."""

    D: int
    d: int
    j: int
    S: int  # actors of this depth
    coarser: int  # actors of depth d + 1
    sweeps: int = 0

    @property
    def nodes(self) -> int:
        """Nodes of the window."""
        return (2 ** (self.D - 1 - self.d)) // self.S

    @property
    def halo(self) -> int:
        """Nodes before the window that the sweeps look back on."""
        return 0 if self.j == 0 or self.d > 0 else self.sweeps // 2

    @property
    def top(self) -> bool:
        """The coarsest depth reads nothing but h_0."""
        return self.d == self.D - 1

    @property
    def last(self) -> bool:
        """The last node, whose target is the label, is here."""
        return self.j == self.S - 1

    @property
    def reads(self) -> list[int]:
        """Shards of depth d + 1 whose states are needed; the first state of the next one also."""
        per = self.S // self.coarser
        own = self.j // per
        return [own - 1, own] if self.halo > (self.j % per) * self.nodes else [own]

    @property
    def beyond(self) -> str:
        """The tensor that holds the state behind the window, if it is not in those that are read"""
        per = self.S // self.coarser
        ends = (self.j + 1) % per == 0
        return "" if self.last or not ends else f"f{self.d + 1}.{(self.j + 1) // per}"

    def name(self, kind: str) -> str:
        """A tensor that this actor makes."""
        return f"{kind}{self.d}.{self.j}"


def windows(D: int, shards: int, sweeps: int = 0) -> list[Window]:
    """The actors' windows, in the order of their hosts 1, 2, …: depth 0 first."""

    def count(d: int) -> int:
        return min(shards, 2 ** (D - 1 - d)) if d < D else 1

    return [
        Window(D, d, j, count(d), count(d + 1), sweeps) for d in range(D) for j in range(count(d))
    ]


def whole_step(pieces: int) -> list[Call]:
    """One host has everything and does it in one op."""
    op = Op("whole", 0)
    return [Call("forward", 0, BOUNDARY, piece, (op,), (), (), True) for piece in range(pieces)]


def one_time_step(
    D: int, pieces: int, shards: int = 1, sweeps: int = 0, lookahead: bool = False
) -> list[Call]:
    """The calls of a step in the order of submission, which is each actor's order of work."""

    def call(
        phase: str, d: int, host: int, piece: int, reads: Sequence[str], writes: Sequence[str],
        last: bool,
    ) -> Call:  # fmt: skip
        op = Op(phase, d, tuple(reads), tuple(writes))
        return Call(phase, d, host, piece, (op,), op.reads, tuple((w,) for w in op.writes), last)

    parts = windows(D, shards, sweeps)
    moved = list(jumps(D, window_of(D)))
    calls = []
    for piece in range(pieces):
        calls.append(call("open", D, BOUNDARY, piece, [], ["x"], False))
        if lookahead:
            calls.append(call("roll", 0, 1, piece, ["x"], ["v0"], False))
        for d in reversed(range(int(lookahead), D)):
            mine = [(1 + i, w) for i, w in enumerate(parts) if w.d == d]
            for host, w in mine:
                reads = ["x"] if w.top else ["x", *(f"s{d + 1}.{k}" for k in w.reads)]
                reads += [w.beyond] if w.beyond else []
                writes = [w.name("s")] if d > 0 else []
                writes += [w.name("f")] if d > 0 and w.j > 0 else []
                writes += [f"e{d}"] if w.last else []
                calls.append(call("ahead", d, host, piece, reads, writes, False))
            settles = d == 0 and not lookahead
            calls.append(call("readout", d, BOUNDARY, piece, [f"e{d}"], [f"g{d}"], settles))
            for host, w in mine:
                final = piece == pieces - 1
                gives = [w.name("G")] if w.S > 1 and final else []
                reads = [f"g{d}"] if w.last else []
                goes_on = gives or (lookahead and d in moved)
                calls.append(call("back", d, host, piece, reads, gives, not goes_on))
        if lookahead:
            at = "v0"
            for d in moved:
                calls.append(call("jump", d, 1 + d, piece, ["x", at], [f"v{d}"], False))
                at = f"v{d}"
            slope = f"a{D}"
            calls.append(call("look", 0, BOUNDARY, piece, [at], [slope], True))
            for d in reversed(moved):
                calls.append(call("return", d, 1 + d, piece, [slope], [f"a{d}"], True))
                slope = f"a{d}"
            calls.append(call("rolled", 0, 1, piece, [slope], [], True))
    for i, w in enumerate(parts):
        if w.S > 1:
            others = [f"G{w.d}.{k}" for k in range(w.S) if k != w.j]
            calls.append(call("add", w.d, 1 + i, pieces - 1, others, [], True))
    return calls
