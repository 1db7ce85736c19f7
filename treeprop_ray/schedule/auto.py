"""placement=auto: hosts x copies x micro-batches by the cost model. Pure Python.

Weights are the same for any placement, and replicas=R microbatches=M/R gives those of
microbatches=M. So the number of hosts is free, and the number of copies as far as the pieces of a
batch stay those of the settings; where replicas= is given it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from treeprop_ray.schedule import planner
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.planner import (
    COPIES,
    DATA,
    PIECES,
    TREE,
    WAYS,
    Candidate,
    Fleet,
    auto,
    divisors,
    fastest,
)
from treeprop_ray.schedule.workload import Workload

if TYPE_CHECKING:
    from treeprop_ray.config import Settings

SHOWN = 3  # alternatives that are named


@dataclass(frozen=True)
class Choice:
    """Settings whose placement is decided, and why, in lines."""

    settings: Settings
    why: tuple[str, ...] = ()


def undecided(settings: Settings) -> bool:
    """Whether the plan is left to us; elastic=true uses every device that there is."""
    given = settings.hosts or settings.head_copies or settings.elastic
    return settings.placement == "auto" and settings.engine == "ray" and not given


def with_copies(settings: Settings) -> list[Settings]:
    """The same pieces of a batch in the hands of one copy or more, in the same order of sums; as
    many copies as are given, if they are."""
    counts = [settings.replicas] if settings.replicas > 1 else divisors(settings.microbatches)
    pieces = settings.replicas * settings.microbatches
    return [replace(settings, replicas=R, microbatches=pieces // R) for R in counts]


def choose(
    settings: Settings,
    work: Workload,
    cluster: Cluster,
    copies: Sequence[int] = (1,),
    suits: Callable[[Settings], bool] = lambda settings: True,
) -> Choice:
    """The fastest plan on a cluster with one of these numbers of copies, what idle devices could do
    for settings that suit the method, and what backpropagation would take on the devices."""
    fleet = Fleet.on(cluster, settings.transport)
    options = auto(work, fleet, copies, settings.pieces)
    if not options:
        return Choice(settings)  # more copies than devices: shares of them
    best, *rest = options
    others = {(c.hosts, c.copies): c for c in reversed(rest)}
    others.pop((best.hosts, best.copies), None)
    named = sorted(others.values(), key=lambda c: c.seconds)[:SHOWN]
    decided = replace(
        settings,
        placement="per_node" if best.per_node else "packed",
        hosts=0 if best.per_node else best.hosts,
        replicas=best.copies,
        microbatches=settings.replicas * settings.microbatches // best.copies,
    )
    ms = 1000 * work.block.forward(work.batch / settings.pieces)
    why = [
        f"placement=auto: {best}, {shown(best)} a step predicted (a block {ms:.3g} ms, "
        f"{work.note}; {fleet.link.name} {fleet.link.bandwidth / 1e9:g} GB/s; Ray "
        f"{1000 * fleet.ray.hop:g} ms from call to call)",
    ]
    if named:
        why.append("  against " + ", ".join(f"{c}: {shown(c)}" for c in named))
    if (idle := more(work, fleet, settings, best, suits)) is not None:
        why.append(idle)
    found = fastest(work, fleet, [way for way in WAYS if way != TREE])
    beside = ", ".join(f"{c.way} {shown(c)} ({brief(c)})" for c in found.values())
    why.append(f"  backpropagation on the same {len(fleet)} devices: {beside}")
    return Choice(decided, tuple(why))


def more(
    work: Workload,
    fleet: Fleet,
    settings: Settings,
    best: Candidate,
    suits: Callable[[Settings], bool] = lambda settings: True,
) -> str | None:
    """A line about what would be faster with devices that stay idle, if anything: another cut of
    the batch, which changes the weights and so is the user's to choose."""
    if best.devices == len(fleet):
        return None
    counts = {R: [m for m in PIECES[TREE] if R * m <= work.batch] for R in COPIES}
    copies = (
        [settings.replicas] if settings.replicas > 1 else [R for R in COPIES if len(fleet) >= R]
    )
    options = [planner.tree(work, fleet, R, m) for R in copies for m in counts.get(R, ())]
    options = [
        c
        for c in options
        if c.memory <= fleet.memory
        and c.devices > best.devices
        and suits(replace(settings, replicas=c.copies, microbatches=c.pieces))
    ]
    faster = min(options, key=lambda c: (c.seconds, c.devices), default=best)
    idle = f"  idle: {len(fleet) - best.devices} of {len(fleet)} devices"
    if faster.seconds >= best.seconds:
        return f"{idle}; none would make the step shorter, however the batch is cut"
    words = f"microbatches={faster.pieces * faster.copies // settings.replicas}"
    return (
        f"{idle}; {words} would use {faster.devices} ({faster}): {shown(faster)} instead of "
        f"{shown(best)}"
    )


def shown(candidate: Candidate) -> str:
    """Milliseconds of a step."""
    return f"{1000 * candidate.seconds:.3g} ms"


def brief(c: Candidate) -> str:
    """A baseline's layout, short."""
    return str(c) if c.way == DATA else f"{c.hosts} x {c.copies}, m={c.pieces}"
