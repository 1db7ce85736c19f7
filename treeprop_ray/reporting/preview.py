"""What a step of a run costs, before it starts: for --cfg."""

from __future__ import annotations

from treeprop_ray import methods
from treeprop_ray.config import Settings, dotted, recurrent
from treeprop_ray.schedule.cost import chain_cost
from treeprop_ray.schedule.time_cost import bptt_cost


def cost_of(settings: Settings) -> str:
    """A step in layers, or cells; not of the user's own blocks, which only its data can make."""
    method, over_time = methods.of(settings), recurrent(settings)
    tree = None if dotted(settings.model.name) and not over_time else method.tree(settings)
    cost = method.cost(settings, tree) if tree else None
    if tree is None or cost is None:
        return ""
    if over_time:
        told = cost.line(bptt_cost(settings.time.depth))
        return f"# a step in applications of a cell, forward and backward: {told}"
    blocks = [tree.layers((l, l + 1)) for l in range(tree.N - 1)]
    shape = f", in blocks of {', '.join(map(str, blocks))}" if tree.grouping else ""
    return f"# a step in layers, forward and backward{shape}: {cost.against(chain_cost(tree))}"
