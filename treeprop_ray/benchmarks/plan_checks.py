"""bench plan: the cost model beside trees times replicas and pipelines that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeprop_ray.benchmarks.crowd import T, trees
from treeprop_ray.benchmarks.replicas import actors_of
from treeprop_ray.core.tree import Tree
from treeprop_ray.schedule.pricing import FREE, RUNTIMES, SHARED, SUBMIT, Runtime
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
    for r in measured:
        kind = r.get("training", "")  # tables of before have other columns
        if kind not in ("trees, store", "trees, stream"):
            continue
        N, devices = int(r["N"]), int(r["devices"])
        way = trees(N, devices, actors_of(N, devices))
        name = f"replicas N={N}, {way.shape} devices, blocks of {1000 * T:.0f} ms"
        predicted, transport = way.seconds(runtime_of(kind, hop)), kind.split(", ")[1]
        rows.append(line(f"{name}, {transport}", predicted, float(r["ms per step"]) / 1e3))
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
