"""bench plan: the cost model beside trees times replicas and pipelines that were measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from treeprop_ray.benchmarks.replicas import T, tree_of
from treeprop_ray.benchmarks.span import as_the_paper
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.copies import copied
from treeprop_ray.schedule.pricing import (
    ETHERNET,
    FREE,
    RUNTIMES,
    SHARED,
    SUBMIT,
    Runtime,
    exchanged,
    price,
)
from treeprop_ray.schedule.steps import pipeline_step, zero_bubble_step
from treeprop_ray.schedule.workload import Part, Workload

BLOCKS, BATCH, STATE = 8, 32, 4 * 64 * 240  # of bench pipeline: ViT blocks, float32


def line(what: str, predicted: float, measured: float) -> dict[str, Any]:
    """A row of the table, in milliseconds."""
    return {
        "run": what,
        "predicted (ms)": 1000 * predicted,
        "measured (ms)": 1000 * measured,
        "predicted / measured": predicted / measured,
    }


def runtime_of(name: str, hop: float) -> Runtime:
    """What Ray adds in a row: by the object store, with the fitted hop, or by stream."""
    return RUNTIMES["stream"] if "stream" in name else Runtime(hop, SUBMIT)


def replicas(measured: Sequence[Mapping[str, str]], hop: float) -> list[dict[str, Any]]:
    """Rows for copies of a tree whose blocks sleep (bench replicas)."""
    rows = []
    for r, transport in itertools.product(measured, ("store", "stream")):
        old = "shares/s" if transport == "store" else ""  # its name in tables of before
        shares = r.get(f"{transport} (shares/s)") or r.get(old)
        if not shares:
            continue
        ray, copies = runtime_of(transport, hop), int(r["trees"].split(" x ")[0])
        calls, hosts, _ = tree_of(int(r["N"]), copies)
        each = copied(calls, hosts, copies, copies)
        cost = partial(as_the_paper, T, 0)
        step = price(each, hosts * copies, cost, lambda _: 0.0, ETHERNET, ray)
        # the driver's calls are those of all copies already
        step = exchanged(step, copies, hosts, [0.0], ETHERNET, ray)
        predicted = max(step.path, step.driver / copies)
        name = f"replicas N={r['N']}, {r['trees']} devices, blocks of {1000 * T:.0f} ms"
        rows.append(line(f"{name}, {transport}", predicted, copies / float(shares)))
    return rows


def pipelines(measured: Sequence[Mapping[str, str]], hop: float) -> list[dict[str, Any]]:
    """Rows for two stages of ViT blocks (bench pipeline), priced by what one process takes."""
    rows, alone = [], 0.0
    for r in measured:
        seconds, name = float(r["ms per step"]) / 1e3, r["training"]
        pieces = int(r.get("micro-batches") or 4)
        if name == "BP, one process":
            alone = seconds
        block = Part(0.0, alone / (3 * (BLOCKS - 1) * BATCH))
        work = Workload.even(Tree(BLOCKS), BATCH, block, Part(), STATE)
        if name == "torch 1F1B":
            predicted = pipeline_step(work, 2, pieces, SHARED, FREE).seconds
        elif "zero" in name.lower():
            predicted = zero_bubble_step(work, 2, pieces, SHARED)
        elif name.startswith("chain of actors"):
            predicted = pipeline_step(work, 2, pieces, SHARED, runtime_of(name, hop)).seconds
        else:
            continue
        rows.append(line(f"ViT, {name}, 2 stages, {pieces} pieces", predicted, seconds))
    return rows
