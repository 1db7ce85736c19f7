"""A plan as a page: the tree, the waves of a step, and sliders.

The browser computes with the same formulas (templates/plan_model.js); nothing is fetched.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treeprop_ray.errors import UserError, first_line
from treeprop_ray.reporting import planning
from treeprop_ray.reporting.templates import render
from treeprop_ray.schedule.placement import lines
from treeprop_ray.schedule.planner import TREE, Fleet, fastest
from treeprop_ray.schedule.workload import Workload

RULE = (
    "objective", "beta", "levels", "input", "ce_at", "right", "ce", "mc_samples", "target_gradient",
    "detach_levels", "by_product",
)  # fmt: skip


def data_of(work: Workload, fleet: Fleet) -> dict[str, Any]:
    """What the page computes with: equal blocks, equal devices."""
    tree = fastest(work, fleet, [TREE])[TREE]
    return {
        "N": work.tree.N,
        "split": work.tree.split,
        "rule": {key: getattr(work.rule, key) for key in RULE},
        "batch": work.batch,
        "state": work.state,
        "block": asdict(work.block),
        "head": asdict(work.head),
        "stem": asdict(work.stem),
        "block_ms": 1000 * work.block.forward(work.batch),
        "link": asdict(fleet.link),
        "hop_ms": 1000 * fleet.ray.hop,
        "submit": fleet.ray.submit,
        "memory": fleet.memory if math.isfinite(fleet.memory) else None,
        "hosts": min(tree.hosts, len(lines(work.tree))),
        "replicas": tree.copies,
        "pieces": tree.pieces,
        "note": work.note,
    }


def write_plan(work: Workload, fleet: Fleet, verdict: str, to: str) -> Path:
    """Write the page."""
    text = render(
        "plan.html",
        data=data_of(work, fleet),
        about=planning.about(work, fleet),
        verdict=verdict,
    )
    path = Path(to)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as e:
        raise UserError(f"to={to}: cannot be written: {first_line(e)}") from e
    return path
