"""method=tree for recurrent networks: TreeProp through time, where each depth has a cell."""

from __future__ import annotations

from dataclasses import replace

from treeprop_ray.config import Settings, dotted, run_name
from treeprop_ray.core.cells import CELLS
from treeprop_ray.core.jumps import jumps, window_of
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.time_tree import TimeRule
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Host
from treeprop_ray.hosts.time import DepthHost, ReadoutHost, WholeTreeHost
from treeprop_ray.methods.base import Resident
from treeprop_ray.methods.bptt import TimeMethod
from treeprop_ray.methods.job import Job
from treeprop_ray.methods.outline import Outline
from treeprop_ray.models.rnn import READOUT, cell_name, part_names
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.cost import Cost
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import Plan, fitted
from treeprop_ray.schedule.time import BOUNDARY, Window, one_time_step, whole_step, windows
from treeprop_ray.schedule.time_cost import forward_applications, time_tree_cost

BOOST = 3.0  # not recipe=paper: learning rate of the deployed cell over that of the others


class TreePropThroughTime(TimeMethod):
    """An actor for each depth (or several) with its cell, and one for data and readout."""

    name = "tree"
    short_paths = True

    def check(self, settings: Settings) -> None:
        """Actors are given by the depths."""
        super().check(settings)
        model = settings.model.name
        if model not in CELLS and not dotted(model):
            raise UserError(
                f"model.name={model}: has no tree over time, a scan goes over it exactly; use "
                "method=bptt"
            )
        if settings.engine == "ray" and settings.placement == "packed":
            raise UserError(
                f"placement=packed: model.name={model} has an actor per depth; use auto"
            )
        if settings.engine == "ray" and settings.hosts:
            raise UserError(
                f"hosts={settings.hosts}: model.name={model} has an actor per depth; use 0"
            )

    def _check_copies(self, settings: Settings) -> None:
        """Shards of a depth add up their own way."""
        super()._check_copies(settings)
        if settings.time.shards > 1:
            raise UserError(
                f"replicas={settings.replicas}: time.shards={settings.time.shards} shares a depth "
                "among actors already; use one of the two"
            )

    def part_names(self, settings: Settings) -> list[str]:
        """A cell for each depth, and the readout."""
        return part_names(settings.time.depth)

    def optimizer(self, settings: Settings, tree: Tree, total_steps: int) -> OptimizerRule:
        """The recipes favour the deployed cell."""
        rule = super().optimizer(settings, tree, total_steps)
        recipe = settings.time.recipe
        if recipe == "paper":
            return rule
        factors = () if recipe == "newton" else ((cell_name(0), BOOST),)
        return replace(rule, factors=factors, clip_each=True)

    def plan(self, settings: Settings, tree: Tree, cluster: Cluster) -> Plan:
        """An actor per depth (and shard) and one boundary."""
        run = run_name(settings)
        cells = [f"depth-{w.d}" + (f"-{w.j}" if w.S > 1 else "") for w in windows_of(settings)]
        names = [f"{run}/boundary", *(f"{run}/{cell}" for cell in cells)]
        layout = Layout({i: i for i in range(1, len(names))})
        return fitted(settings, layout, names, cluster)

    def calls(self, job: Job, plan: Plan) -> list[Call]:
        """Depth by depth; one host alone does everything in one op."""
        time, pieces = job.settings.time, job.settings.pieces
        if len(plan.names) == 1:
            return whole_step(pieces)
        return one_time_step(
            time.depth, pieces, time.shards, time.sweeps, time_rule(job.settings).lookahead
        )

    def host(self, job: Job, plan: Plan, index: int) -> Host:
        """Everything, the readout, or the cell of a depth."""
        rule = time_rule(job.settings)
        if len(plan.names) == 1:
            return WholeTreeHost(job.share(self.part_names(job.settings), plan, opens=True), rule)
        if index == BOUNDARY:
            return ReadoutHost(job.share([READOUT], plan, opens=True))
        window = windows_of(job.settings)[index - 1]
        return DepthHost(job.share([cell_name(window.d)], plan, opens=False), window, rule)

    def residents(self, settings: Settings, plan: Plan, tree: Tree) -> list[Resident]:
        """Readout and depths."""
        out = [Resident("data, readout", "-", BOUNDARY, (READOUT,))]
        for i, w in enumerate(windows_of(settings)):
            shard = f", nodes {w.j + 1}/{w.S}" if w.S > 1 else ""
            cell = f"cell of depth {w.d}{shard}"
            out.append(Resident(cell, str(w.d), 1 + i, (cell_name(w.d),)))
        return out

    def outline(self, settings: Settings, tree: Tree) -> Outline:
        """Losses by depth, the tree readout and the deployed chain."""
        time = settings.time
        terms: dict[int, dict[str, float]] = {d: {"ce": 1.0} for d in range(time.depth)}
        for d in range(time.depth - 1):
            terms[d]["right"] = 1.0  # the coarsest depth has one node, whose target is the label
        if time.sweeps:
            terms[0]["cons"] = time.lambda_cons
        if time.recipe == "newton":
            terms[0] = {"ce": 1.0, "cons": 0.0}
        spine = tree.spine_paths
        if time.recipe == "lookahead":  # the deployed cell has no nodes: the tree ends at depth 1
            moved = jumps(time.depth, window_of(time.depth))
            terms[0] = {"roll": 1.0, "look": 1.0} if moved else {"roll": 1.0}
            spine = spine[:-1] or spine
        paths = {"tree": spine[-1], "full": tree.chain}
        deployed = frozenset({cell_name(0), READOUT})
        return Outline(tree, paths, terms, deployed, forward_applications(time), "depth", True, 1)

    def cost(self, settings: Settings, tree: Tree) -> Cost:
        """The longest line of applications, with an actor for every depth."""
        return time_tree_cost(settings.time)


def time_rule(settings: Settings) -> TimeRule:
    """The part of the settings that is about the time tree."""
    time = settings.time
    return TimeRule(
        time.depth,
        time.sweeps,
        time.lambda_cons,
        lookahead=time.recipe == "lookahead",
        summed=time.loss == "sum",
        one_step=time.gradient == "one",
        newton=time.recipe == "newton",
        damping=time.damping,
    )


def windows_of(settings: Settings) -> list[Window]:
    """The windows of a run."""
    return windows(settings.time.depth, settings.time.shards, settings.time.sweeps)
