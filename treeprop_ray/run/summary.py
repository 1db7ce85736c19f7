"""What summary.json says of a run that is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treeprop_ray.run.callbacks import Scores

if TYPE_CHECKING:
    from treeprop_ray.run.trainer import Trainer


def summary_of(run: Trainer, scores: Mapping[str, Scores]) -> dict[str, Any]:
    """Settings in short, sizes and costs, and the scores by split and path."""
    s, job, outline, tree = run.settings, run.job, run.outline, run.engine.tree
    shapes = run.engine.shapes()
    deployed = [v for k, v in shapes.items() if k.split("/")[0] in outline.deployed]
    cost = job.method.cost(s, tree)  # of the mean step, in layers (schedule/cost.py)
    summary = {
        "name": run.folder.name if run.folder else "",
        "method": s.method,
        "engine": s.engine,
        "data": s.data.name,
        "samples": dict(job.sizes),
        "seed": s.seed,
        "N": tree.N,
        "depth": tree.depth,
        "steps": run.done,
        "epochs": run.done / run.per_epoch,
        "samples_seen": run.done * s.step_samples,
        "parameters_trained": sum(v.numel() for v in shapes.values()),
        "parameters_deployed": sum(v.numel() for v in deployed),
        "block_applications_per_step": outline.applications,
        "stages": job.method.stages(job),
        **({"cost": {"work": cost.work, "critical_path": cost.path}} if cost else {}),
        "wall_seconds": round(run.wall, 2),
        "final": {
            split: {name: outline.figures(score) for name, score in by_path.items()}
            for split, by_path in scores.items()
        },
        "best_validation": run.judge.best,
        "test_by_epoch": outline.over_epochs(run.judge.tests),
        "leak": run.log.leak,
        "correction_ratio": run.log.ratio,
        "correction_ratios": run.log.ratios,
        "table": outline.table(outline.paths, scores),
        **({"stopped": run.stopped} if run.stopped else {}),
        **run.origin,
    }
    if run.folder and run.folder.changes:
        summary["changes"] = run.folder.changes
    return summary
