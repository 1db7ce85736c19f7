"""Which actors a run would have on this machine: for --cfg."""

from __future__ import annotations

from treeprop_ray import data, methods
from treeprop_ray.config import Settings
from treeprop_ray.engine import runtime
from treeprop_ray.methods.auto import decided
from treeprop_ray.reporting.tables import columns


def placement_of(settings: Settings) -> str:
    """Where every node would live on this machine."""
    method, cluster = methods.of(settings), runtime.cluster_of(settings.ray)
    choice = decided(settings, cluster)
    settings = choice.settings
    recipe = method.network(settings, data.load(settings).shape)
    tree = method.tree(settings)
    plan = method.plan(settings, tree, cluster)
    device = f"{plan.gpus:g} GPU" if plan.gpus else f"{plan.cpus:g} CPU"
    rows = [["node", "level", "actor", "device", "parameters"]]
    for resident in method.residents(settings, plan, tree):
        count = sum(map(recipe.count_parameters, resident.parts))
        actor = plan.names[resident.host]
        rows.append([resident.node, resident.level, actor, device, f"{count:,}"])
    lines = [*choice.why, f"placement on {cluster}:", *columns(rows, str.rjust).splitlines()]
    if plan.copies > 1:
        lines.append(
            f"{plan.copies} copies of these actors (…-copy-1, …), each with 1/{plan.copies} of "
            f"every batch of {settings.step_samples} samples"
        )
    return "\n".join(f"# {line}" for line in lines)
