"""method=bp: backpropagation of the chain, in one process or as a pipeline of stages."""

from __future__ import annotations

from dataclasses import replace

from treeprop_ray.config import Settings, run_name
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.rule import JUDGING
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Host
from treeprop_ray.hosts.chain import ChainHost
from treeprop_ray.methods.base import Resident
from treeprop_ray.methods.blocks import BlockMethod
from treeprop_ray.methods.job import Job
from treeprop_ray.methods.outline import Outline
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.cost import Cost, chain_cost
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import Plan, plan_stages, stages


class ChainMethod(BlockMethod):
    """The chain's blocks, the head among them, in runs of equal length."""

    parts_ends = True

    def plan(self, settings: Settings, tree: Tree, cluster: Cluster) -> Plan:
        """A stage for each actor."""
        return plan_stages(settings, tree, cluster, run_name(settings))

    def pinned(self, settings: Settings, plan: Plan) -> Settings:
        """As many stages as the plan has."""
        pinned = super().pinned(settings, plan)
        return replace(pinned, placement="packed", hosts=len(plan.names))

    def residents(self, settings: Settings, plan: Plan, tree: Tree) -> list[Resident]:
        """Stages."""
        out = []
        for k, cut in enumerate(stages(tree, len(plan.names))):
            parts = tuple(edge_name(edge) for edge in ([STEM, *cut] if k == 0 else cut))
            out.append(Resident(f"{cut[0][0]}-{cut[-1][1]}", "-", k, parts))
        return out

    def about(self, settings: Settings, plan: Plan, tree: Tree, index: int) -> str:
        """The run of blocks."""
        cut = stages(tree, len(plan.names))[index]
        return f"blocks {cut[0][0]}..{cut[-1][1]}" if cut else "no block"


class Backpropagation(ChainMethod):
    """One forward, one loss, one backward."""

    name = "bp"
    replicates = True
    recomputes = True
    takes_context = True

    def misfit(self, model: str) -> str:
        """Recurrent networks have a backpropagation of their own."""
        return f"for model.name={model} use method=bptt"

    def check(self, settings: Settings) -> None:
        """Tied weights cannot live in two stages; workers need a place each."""
        super().check(settings)
        if settings.model.name == "gpt" and settings.engine == "ray":
            raise UserError(
                "method=bp engine=ray: the head of model.name=gpt uses the stem's weights, so the "
                "two cannot be different stages of a chain; use engine=local"
            )
        pieces = settings.hosts * settings.microbatches
        if settings.engine == "train" and pieces > settings.batch:
            raise UserError(
                f"hosts={settings.hosts} microbatches={settings.microbatches}: "
                f"more pieces than batch={settings.batch}"
            )

    def calls(self, job: Job, plan: Plan) -> list[Call]:
        """A pipeline; with one stage plain backpropagation."""
        pieces, side_inputs = job.settings.pieces, job.rule.side_inputs
        return one_chain_step(len(plan.names), job.stem_trains, pieces, side_inputs)

    def host(self, job: Job, plan: Plan, index: int) -> Host:
        """A stage."""
        names = self.residents(job.settings, plan, job.tree)[index].parts
        share = job.share(names, plan, opens=index == 0)
        cut = stages(job.tree, len(plan.names))[index]
        return ChainHost(share, job.tree, job.rule, cut, job.stem_trains)

    def cost(self, settings: Settings, tree: Tree) -> Cost:
        """Forward and backward of every layer."""
        return chain_cost(tree)

    def outline(self, settings: Settings, tree: Tree) -> Outline:
        """The chain and its cross-entropy."""
        terms = dict.fromkeys(("own", "right", "ce"), 1.0)  # the columns of a tree's run
        return Outline(
            tree=tree,
            paths={"full": tree.chain},
            weights={**{n: dict(terms) for n in tree.nodes}, tree.N: {"ce": 1.0}},
            deployed=self.deployed(tree),
            applications=sum(map(tree.layers, tree.path_edges(tree.chain))),
            head_blocks=int(settings.model.output_block),
            perplexity=settings.model.name == "gpt",
            judges=settings.loss.name in JUDGING,
        )
