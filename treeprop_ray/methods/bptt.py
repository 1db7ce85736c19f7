"""method=bptt and bptt_fused: backpropagation through time of the deployed cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from treeprop_ray.config import Settings, run_name
from treeprop_ray.core.network import Shape
from treeprop_ray.core.scoring import Score
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Which
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Host
from treeprop_ray.hosts.time import BpttHost, TimeHost
from treeprop_ray.methods.base import Crew, Method, Resident
from treeprop_ray.methods.job import Job
from treeprop_ray.methods.outline import Outline
from treeprop_ray.models.rnn import READOUT, TimeBlueprint, TimeNetwork, cell_name
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.cost import Cost
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import Plan, fitted
from treeprop_ray.schedule.time import whole_step
from treeprop_ray.schedule.time_cost import bptt_cost


class TimeMethod(Method):
    """What methods over the symbols of a sequence share."""

    over_time = True

    def check(self, settings: Settings) -> None:
        """What a recurrent network cannot do, whatever the method."""
        super().check(settings)
        if settings.chain_lr != 1:
            raise UserError(
                f"chain_lr={settings.chain_lr}: is for trees over blocks; through time use "
                "time.recipe"
            )

    def part_names(self, settings: Settings) -> list[str]:
        """The parts that are trained."""
        return [cell_name(0), READOUT]

    def network(self, settings: Settings, shape: Shape) -> TimeBlueprint:
        """Cells and readout."""
        recipe = TimeBlueprint(settings, shape)
        if settings.model.recurrent:  # what is wrong with an own cell is said at once
            recipe.parts(self.part_names(settings), settings.seed, shape.dtype)
        return recipe

    def tree(self, settings: Settings) -> Tree:
        """The tree over the symbols."""
        return Tree(2**settings.time.depth, settings.split)

    def assemble(
        self, settings: Settings, shape: Shape, weights: Mapping[str, Tensor]
    ) -> TimeNetwork:
        """The network with the weights of a run."""
        network = TimeNetwork.of(settings, shape, self.part_names(settings))
        network.load(weights)
        return network

    def score(
        self, crew: Crew, paths: Mapping[str, Sequence[int]], batches: Sequence[Which]
    ) -> dict[str, Score]:
        """Hosts send their cells to the one that has the data and the readout."""
        job, others = crew.job, range(1, len(crew.plan.names))
        network = partial(TimeNetwork.of, job.settings, job.shape, self.part_names(job.settings))
        cells = [crew.ask(host, TimeHost.weights) for host in others]
        asked = crew.ask(0, TimeHost.score_here, network, paths, batches, *cells)
        scores: dict[str, Score] = crew.get([asked])[0]
        return scores


class Bptt(TimeMethod):
    """One chain of steps, in one process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, settings: Settings) -> None:
        """It is one chain of steps; torch has a fused GRU only."""
        super().check(settings)
        s, model = settings, settings.model.name
        if s.method == "bptt_fused" and model != "gru":
            raise UserError(f"method=bptt_fused: torch has no fused {model} cell; use method=bptt")
        if s.engine == "ray":
            raise UserError(
                f"engine=ray: method={s.method} is one chain of steps; use engine=local"
            )

    def plan(self, settings: Settings, tree: Tree, cluster: Cluster) -> Plan:
        """One process."""
        return fitted(settings, Layout({}), [f"{run_name(settings)}/chain"], cluster)

    def calls(self, job: Job, plan: Plan) -> list[Call]:
        """Everything in one op."""
        return whole_step(job.settings.pieces)

    def host(self, job: Job, plan: Plan, index: int) -> Host:
        """The deployed cell and the readout."""
        share = job.share(self.part_names(job.settings), plan, opens=True)
        return BpttHost(share, torch_gru=self.name == "bptt_fused")

    def residents(self, settings: Settings, plan: Plan, tree: Tree) -> list[Resident]:
        """Everything in one place."""
        return [Resident("chain", "-", 0, tuple(self.part_names(settings)))]

    def outline(self, settings: Settings, tree: Tree) -> Outline:
        """The deployed chain and its cross-entropy."""
        deployed = frozenset(self.part_names(settings))
        terms, paths = {0: {"ce": 1.0}}, {"full": tree.chain}
        return Outline(tree, paths, terms, deployed, tree.N, "depth", True, 1)

    def cost(self, settings: Settings, tree: Tree) -> Cost:
        """The chain of steps, there and back; a scan over them where the cell lets it."""
        return bptt_cost(settings.time.depth, settings.model.name == "mingru")
