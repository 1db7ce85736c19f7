"""bench plan, third table: what `treeprop plan` says of GPT-2 large, beside what was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from treeprop_ray import config
from treeprop_ray.methods.weighing import GPU, anatomy_of, workload
from treeprop_ray.reporting import planning
from treeprop_ray.reporting.tables import markdown
from treeprop_ray.schedule.planner import TREE, Fleet, fastest
from treeprop_ray.schedule.pricing import ETHERNET, NVLINK, Runtime
from treeprop_ray.schedule.workload import Workload

NAME, TITLE = "plan_gpt2_large", "A plan for GPT-2 large on 8 and 64 GPUs"
COMMAND = "treeprop plan experiment=wikitext103_d6 batch=64 nodes={nodes} gpus=8"
CLUSTERS = {8: NVLINK, 64: ETHERNET}
MEMORY = 80e9


def rows_and_notes(
    ray: Runtime, checks: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The tables of both clusters, with the experiment's beta = 0.5 and with beta = 0."""
    settings = config.load(["experiment=wikitext103_d6", "batch=64"])
    work = workload(settings, anatomy_of(settings), GPU)
    plain = replace(work, rule=replace(work.rule, beta=0.0))
    rows: list[dict[str, Any]] = []
    notes = []
    for count, link in CLUSTERS.items():
        fleet = Fleet((1.0,) * count, link, ray, MEMORY)
        command = COMMAND.format(nodes=count // 8)
        rows += rows_of(count, work, plain, fleet)
        for what, each in (("", work), (" beta=0", plain)):
            verdict = planning.verdict(each, fleet, fastest(each, fleet))
            notes += [f"`{command}{what}`: {verdict}.", ""]
    note = (
        "**Nothing of the table above was measured.** Blocks are counted (FLOP of real modules on "
        "tensors without numbers) and run at 125 TFLOP/s, 40 % of an A100's bf16 peak, less for "
        f"small pieces; 80 GB; Ray {1000 * ray.hop:.1f} ms from call to call for the waves, "
        "nothing for the others. Zero bubble is a formula, on paper. beta > 0 asks the head at "
        "every level of the spine, and this head costs four blocks. Below: the same "
        "model beside what was measured on two cores (bench_plan_check.md)."
    )
    return rows, [*notes, note, "", markdown(checks)]


def rows_of(count: int, work: Workload, plain: Workload, fleet: Fleet) -> list[dict[str, Any]]:
    """One cluster: the tree twice, then the others."""
    found = fastest(work, fleet)
    trees = {"tree x replicas, beta = 0": fastest(plain, fleet, [TREE])[TREE]}
    trees["tree x replicas, beta = 0.5"] = found.pop(TREE)
    rows = planning.rows({**trees, **found}, fleet.memory)
    return [{"GPUs": count, "link": fleet.link.name, **row} for row in rows]
