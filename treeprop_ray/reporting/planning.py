"""What a plan says: a table of the ways to train, and which is fastest from where on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from treeprop_ray.schedule.planner import TREE, Candidate, Fleet, fastest, winner
from treeprop_ray.schedule.workload import Workload

NAMES = {TREE: "tree x replicas"}
LARGEST = 512  # blocks and devices up to which the border is looked for
Case = tuple[int, Workload, Fleet]


def name_of(way: str) -> str:
    """A way, for people."""
    return NAMES.get(way, way)


def about(work: Workload, fleet: Fleet) -> list[str]:
    """What the table is made from."""
    tree, block = work.tree, work.block
    speeds = sorted(set(fleet.speeds), reverse=True)
    kinds = ", ".join(f"{fleet.speeds.count(s)} of speed {s:g}" for s in speeds)
    uneven = f" ({kinds})" if len(speeds) > 1 else ""
    memory = "" if fleet.memory == float("inf") else f" with {fleet.memory / 1e9:g} GB each"
    trees = sum(p.parameters for p in (*work.blocks.values(), work.head, work.stem))
    chain = sum(work.blocks[l, l + 1].parameters for l in range(tree.N - 1))
    chain += work.head.parameters + work.stem.parameters
    return [
        f"network: N = {tree.N} blocks (the head counts), depth {tree.depth}, "
        f"{millions(chain)} parameters deployed, {millions(trees)} in the tree",
        f"batch {work.batch}: a block takes {duration(block.forward(work.batch))} forward, the "
        f"head {duration(work.head.forward(work.batch))} ({work.note}); a state has "
        f"{work.state * work.batch / 1e6:.3g} MB",
        f"devices: {len(fleet)}{uneven}{memory}; {fleet.link.name} "
        f"{fleet.link.bandwidth / 1e9:g} GB/s; Ray {duration(fleet.ray.hop)} from call to call "
        "(waves only)",
    ]


def duration(seconds: float) -> str:
    """Three digits, in milliseconds or in seconds."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def times(factor: float) -> str:
    """A factor, with no more digits than it is worth."""
    return f"{factor:.2f}" if factor < 10 else f"{factor:.0f}"


def millions(count: float) -> str:
    """Parameters, short."""
    return f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:.0f}"


def rows(found: Mapping[str, Candidate], memory: float) -> list[dict[str, Any]]:
    """One for every way."""
    quickest = min(c.seconds for c in found.values())
    return [
        {
            "way": name_of(way),
            "layout": str(c),
            "devices": c.devices,
            "step (ms)": 1000 * c.seconds,
            "x fastest": c.seconds / quickest,
            "GB per device": c.memory / 1e9,
            "GB sent per step": c.step.moved / 1e9,
            "fits": "yes" if c.memory <= memory else "no",
        }
        for way, c in found.items()
    ]


def verdict(work: Workload, fleet: Fleet, found: Mapping[str, Candidate]) -> str:
    """One line: which way is fastest, and from where on that changes, all else equal."""
    first = winner(dict(found), fleet.memory)
    if not first:
        return "none fits: more devices, more memory (recompute=true), or a smaller batch"
    best, tree = found[first], found[TREE]
    told = f"fastest: {name_of(first)}, {duration(best.seconds)} a step"
    if first == TREE:
        others = min(c.seconds for w, c in found.items() if w != TREE and c.memory <= fleet.memory)
        told += f", {times(others / best.seconds)} times as fast as the best of the others"
    else:
        told += f"; the tree takes {times(tree.seconds / best.seconds)} times as long"
        told += "" if tree.memory <= fleet.memory else " and does not fit"
    changes = [
        text for what, cases in axes(work, fleet).items() if (text := change(what, first, cases))
    ]
    if not changes:
        return f"{told}; within {LARGEST} blocks and devices, nothing that was tried changes that"
    return f"{told}; that changes with {', with '.join(changes)} (all else equal)"


def axes(work: Workload, fleet: Fleet) -> dict[str, Iterable[Case]]:
    """What may be larger or smaller, step by step away from here."""
    N, count, batch = work.tree.N, len(fleet), work.batch

    def cases(
        values: Iterable[int], make: Callable[[int], tuple[Workload, Fleet]]
    ) -> Iterable[Case]:
        return ((value, *make(value)) for value in values)

    def devices(value: int) -> tuple[Workload, Fleet]:
        again = (fleet.speeds * -(-value // count))[:value]
        return work, replace(fleet, speeds=tuple(sorted(again, reverse=True)))

    up = (2, 4, 8, 16, 32, 64)
    return {
        "devices or more": cases([count * k for k in up if count * k <= LARGEST], devices),
        "devices or fewer": cases([count // k for k in up if count // k >= 2], devices),
        "blocks or more": cases(
            [N * k for k in up[:3] if N * k <= LARGEST], lambda n: (work.resized(n), fleet)
        ),
        "samples in a batch or fewer": cases(
            [batch // k for k in up if batch // k >= 1],
            lambda n: (replace(work, batch=n), fleet),
        ),
        "samples in a batch or more": cases(
            [batch * k for k in up[:4:2]], lambda n: (replace(work, batch=n), fleet)
        ),
    }


def change(what: str, first: str, cases: Iterable[Case]) -> str:
    """Where on an axis another way becomes the fastest; empty if nowhere."""
    for value, work, fleet in cases:
        way = winner(fastest(work, fleet), fleet.memory)
        if way != first:
            what = what.replace("samples", "sample") if value == 1 else what
            return f"{value} {what} ({name_of(way) if way else 'nothing fits'})"
    return ""
