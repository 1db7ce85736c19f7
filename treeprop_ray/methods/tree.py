"""method=tree: TreeProp over the blocks of a network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from treeprop_ray.config import Settings, dotted, family_of, run_name
from treeprop_ray.core.frozen import still_in_tree
from treeprop_ray.core.growth import check_growing
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import JUDGING, Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.head import HeadCopy
from treeprop_ray.hosts.tree import TreeHost
from treeprop_ray.methods.base import Resident
from treeprop_ray.methods.blocks import BlockMethod
from treeprop_ray.methods.job import Job
from treeprop_ray.methods.outline import Outline
from treeprop_ray.methods.stages import Stage, check_stages, finish_path, shares_of, stages_of
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.coarse import coarse_calls
from treeprop_ray.schedule.cost import Cost, chain_cost, sweep_cost, tree_cost
from treeprop_ray.schedule.growth import GROW, auxiliary_edges
from treeprop_ray.schedule.ops import STEP, Call
from treeprop_ray.schedule.placement import Plan, plan_tree
from treeprop_ray.schedule.probe import FINISH, path_calls, probe_calls
from treeprop_ray.schedule.sweeps import sweep_calls
from treeprop_ray.schedule.tree import one_step, order_of_sums


class TreeProp(BlockMethod):
    """Level waves over the tree of blocks."""

    name = "tree"
    short_paths = True
    probed = True
    recomputes = True
    takes_context = True
    finishes = True
    copies_heads = True
    planned = True

    def check(self, settings: Settings) -> None:
        """What the objective asks for."""
        super().check(settings)
        bernoulli, mean = family_of(settings) == "bernoulli", settings.alpha + settings.beta
        if bernoulli and settings.bernoulli == "kl" and abs(mean - 1) > 1e-9:
            raise UserError(
                f"alpha={settings.alpha} beta={settings.beta}: "
                "the Bernoulli family needs alpha + beta = 1, or bernoulli=literal"
            )
        if settings.reduction == "sigma" and not bernoulli and settings.sigma == 0:
            raise UserError("reduction=sigma: divides by sigma^2; needs sigma above 0")
        check_stages(settings, None if dotted(settings.model.name) else self.tree(settings))

    def rule(self, settings: Settings, family: str, labels_per_sample: int) -> Rule:
        """Of all methods only this one draws several samples of the objective."""
        return Rule.of(settings, family, labels_per_sample)

    def optimizer(self, settings: Settings, tree: Tree, total_steps: int) -> OptimizerRule:
        """The chain's blocks may have a learning rate of their own, as long as the tree trains."""
        rule = super().optimizer(settings, tree, total_steps)
        if settings.chain_lr == 1:
            return rule
        factors = tuple((f"{l}-{l + 1}", settings.chain_lr) for l in range(tree.N - 1))
        stages = stages_of(settings, tree, total_steps)
        end = next((s.first for s in stages if s.is_chain), total_steps)
        return replace(rule, factors=factors, factors_end=end)

    def still(self, tree: Tree, trained: Collection[str]) -> frozenset[int]:
        """States hang on the left blocks above them."""
        return still_in_tree(tree, trained)

    def plan(self, settings: Settings, tree: Tree, cluster: Cluster) -> Plan:
        """Nodes, or lines of nodes, over actors."""
        rule = Rule.of(settings, family_of(settings))
        asking = [node.n for node in tree.spine if rule.asks_head(tree, node)]
        return plan_tree(settings, tree, cluster, run_name(settings), asking)

    def pinned(self, settings: Settings, plan: Plan) -> Settings:
        """The kind of placement is part of what the plan decided."""
        per_node = plan.names[0].endswith("/boundary")
        nodes = len(plan.names) - settings.head_copies
        kind, hosts = ("per_node", 0) if per_node else ("packed", nodes)
        return replace(super().pinned(settings, plan), placement=kind, hosts=hosts)

    def calls(self, job: Job, plan: Plan) -> list[Call]:
        """The level waves."""
        pieces = job.settings.pieces
        return one_step(job.tree, job.rule, plan.layout, job.stem_trains, pieces)

    def other_calls(self, job: Job, plan: Plan) -> dict[str, list[Call]]:
        """The probe's passes, and those of later stages of a run."""
        words = (job.tree, job.rule, plan.layout, job.stem_trains, job.settings.pieces)
        passes = {}
        for stage in stages_of(job.settings, job.tree, job.total_steps)[1:]:
            if stage.level:
                passes[stage.name] = coarse_calls(*words, stage.level)
            elif job.settings.finish_sweeps:
                passes[stage.name] = sweep_calls(*words, job.settings.finish_sweeps)
            else:
                path = finish_path(job.settings, job.tree)
                passes[stage.name] = path_calls(*words, path)
                if job.settings.finish_from == "path":
                    passes[GROW] = path_calls(*words, path, grows=True)
        return {**passes, **probe_calls(*words)}

    def pass_at(self, job: Job, step: int) -> str:
        """Fewer levels, or backpropagation, if the settings say so."""
        stages = stages_of(job.settings, job.tree, job.total_steps)
        stage = next(stage for stage in reversed(stages) if stage.first <= step)
        grows = job.settings.finish_from == "path" and stage.name == FINISH
        return GROW if grows and step == stage.first else stage.name

    def stages(self, job: Job) -> dict[str, dict[str, int]] | None:
        """The tree, without its finest levels, and the path at the end."""
        stages = stages_of(job.settings, job.tree, job.total_steps)
        if len(stages) == 1:
            return None
        ends = [stage.first for stage in stages[1:]] + [job.total_steps]
        return {
            stage.name: {
                "steps": end - stage.first,
                "block_applications_per_step": self._applications(job, stage),
            }
            for stage, end in zip(stages, ends, strict=True)
        }

    def _applications(self, job: Job, stage: Stage) -> int:
        if stage.name == STEP:
            return block_applications(job.rule, job.tree)
        return round(stage_cost(job.settings, job.tree, job.rule, stage).work) // 2

    def owners(self, tree: Tree, plan: Plan) -> dict[Edge, int]:
        """A node's blocks live with it, stem and head at the boundary."""
        at, boundary = plan.layout.host_of, plan.layout.boundary
        owner = {STEM: boundary, tree.head: boundary}
        for node in tree.nodes.values():
            owner[node.left] = at[node.n]
            if not tree.is_spine(node):
                owner[node.right] = at[node.n]
        return owner

    def host(self, job: Job, plan: Plan, index: int) -> TreeHost:
        """Some nodes with their blocks, and the boundary if it is here."""
        if index in plan.layout.heads.values():
            ends = [edge_name(STEM), edge_name(job.tree.head)]
            return HeadCopy(job.share(ends, plan, opens=False), job.tree, job.rule)
        owner = self.owners(job.tree, plan)
        names = [edge_name(edge) for edge, host in owner.items() if host == index]
        nodes = [n for n, host in plan.layout.host_of.items() if host == index]
        share = job.share(names, plan, opens=index == plan.layout.boundary)
        host = TreeHost(share, job.tree, job.rule, nodes, job.stem_trains)
        if job.settings.finish_from == "path":
            chain = {edge_name(edge) for edge in job.tree.path_edges(job.tree.chain)[:-1]}
            given = {edge_name(edge) for edge in auxiliary_edges(job.tree)}
            check_growing([part for name, part in host.parts.items() if name in chain | given])
        if plan.layout.heads and index == plan.layout.boundary:
            host.note_sums(order_of_sums(job.tree, job.rule, job.stem_trains, job.settings.pieces))
        return host

    def residents(self, settings: Settings, plan: Plan, tree: Tree) -> list[Resident]:
        """The boundary, and every node with the blocks that are its own."""
        ends = (edge_name(STEM), edge_name(tree.head))
        out = [Resident("ends", "0", plan.layout.boundary, ends)]
        for node in sorted(tree.nodes.values(), key=lambda n: (n.level, n.n)):
            edges = [node.left] if tree.is_spine(node) else [node.left, node.right]
            host, names = plan.layout.host_of[node.n], tuple(map(edge_name, edges))
            out.append(Resident(str(node.n), str(node.level), host, names))
        return out

    def cost(self, settings: Settings, tree: Tree) -> Cost:
        """The waves with an actor for every node, and those of later stages."""
        rule = Rule.of(settings, family_of(settings))
        later = [
            (share, stage_cost(settings, tree, rule, stage))
            for stage, share in shares_of(settings, tree)[1:]
        ]
        return tree_cost(tree, rule).mixed(later)

    def about(self, settings: Settings, plan: Plan, tree: Tree, index: int) -> str:
        """Level and interval of its nodes."""
        copied = [str(n) for n, host in plan.layout.heads.items() if host == index]
        if copied:
            return f"copy of the head for node {', '.join(copied)}"
        nodes = [tree.nodes[n] for n, host in plan.layout.host_of.items() if host == index]
        about = [f"node {n.n} level {n.level} ({n.l}, {n.r})" for n in nodes]
        return "; ".join((["stem, head"] if index == plan.layout.boundary else []) + about)

    def outline(self, settings: Settings, tree: Tree) -> Outline:
        """Spine paths and the chain; own, right and cross-entropy of every node."""
        rule = Rule.of(settings, family_of(settings))
        weights = {
            n: dict(zip(("own", "right"), rule.node_weight(node), strict=True))
            | {"ce": rule.ce_weight(tree, node)}
            for n, node in tree.nodes.items()
        }
        return Outline(
            tree=tree,
            paths=tree.named_paths,
            weights={**weights, tree.N: {"ce": 1.0}},
            deployed=self.deployed(tree),
            applications=block_applications(rule, tree),
            head_blocks=int(settings.model.output_block),
            perplexity=settings.model.name == "gpt",
            judges=settings.loss.name in JUDGING,
            clean=(tree.spine_paths[-1], tree.spine[-1].n),
        )


def stage_cost(settings: Settings, tree: Tree, rule: Rule, stage: Stage) -> Cost:
    """A step of a stage after the first."""
    if stage.level:
        return tree_cost(tree, rule, stage.level)
    if settings.finish_sweeps:
        return sweep_cost(tree, rule, settings.finish_sweeps)
    return chain_cost(tree, finish_path(settings, tree))


def block_applications(rule: Rule, tree: Tree) -> int:
    """Forward applications of layers (the head counts) in one step; each has one backward."""
    nodes, beta = tree.nodes.values(), rule.beta > 0
    lefts = sum(tree.layers(n.left) for n in nodes)
    rights = sum(tree.layers(n.right) for n in nodes if beta or rule.right_weight(tree, n) > 0)
    twice = sum(  # for the correction, for the loss
        tree.layers(n.right) for n in nodes if beta and rule.at_sample(tree, n)
    )
    return (lefts + rights + twice) * rule.mc_samples
