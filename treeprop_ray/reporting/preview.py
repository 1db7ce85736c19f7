"""What --cfg shows of a run before it starts, as comments behind its settings."""

from __future__ import annotations

from treeprop_ray import data, methods
from treeprop_ray.config import Settings, dotted
from treeprop_ray.engine import runtime
from treeprop_ray.reporting.tables import columns
from treeprop_ray.schedule.cost import chain_cost


def cost_of(settings: Settings) -> str:
    """A step in layers; not of the user's own network, which only its data can make."""
    method = methods.of(settings)
    tree = None if dotted(settings.model.name) else method.tree(settings)
    cost = method.cost(settings, tree) if tree else None
    if tree is None or cost is None:
        return ""
    blocks = [tree.layers((l, l + 1)) for l in range(tree.N - 1)]
    shape = f", in blocks of {', '.join(map(str, blocks))}" if tree.grouping else ""
    return f"# a step in layers, forward and backward{shape}: {cost.against(chain_cost(tree))}"


def placement_of(settings: Settings) -> str:
    """Where every node would live on this machine."""
    if settings.engine != "ray":
        return ""
    method, cluster = methods.of(settings), runtime.cluster_of(settings.ray)
    recipe = method.network(settings, data.load(settings).shape)
    tree = method.tree(settings)
    plan = method.plan(settings, tree, cluster)
    device = f"{plan.gpus:g} GPU" if plan.gpus else f"{plan.cpus:g} CPU"
    rows = [["node", "level", "actor", "device", "parameters"]]
    for resident in method.residents(settings, plan, tree):
        count = sum(map(recipe.count_parameters, resident.parts))
        actor = plan.names[resident.host]
        rows.append([resident.node, resident.level, actor, device, f"{count:,}"])
    lines = [f"placement on {cluster}:", *columns(rows, str.rjust).splitlines()]
    if plan.copies > 1:
        lines.append(
            f"{plan.copies} copies of these actors (…-copy-1, …), each with 1/{plan.copies} of "
            f"every batch of {settings.step_samples} samples"
        )
    return "\n".join(f"# {line}" for line in lines)
