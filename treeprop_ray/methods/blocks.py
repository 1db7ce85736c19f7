"""What methods over blocks share: the network of the settings, and scores along paths."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from treeprop_ray.config import Settings, dotted
from treeprop_ray.core.frozen import still_in_chain
from treeprop_ray.core.grouping import grouping_of
from treeprop_ray.core.network import (
    STEM,
    Blueprint,
    Shape,
    TreeNetwork,
    edge_name,
    named,
    part_state,
)
from treeprop_ray.core.scoring import Score, measure
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.data import Scoring, Which, load
from treeprop_ray.hosts.base import HALF
from treeprop_ray.hosts.blocks import BlockHost
from treeprop_ray.methods.base import Crew, Method
from treeprop_ray.models import blueprint
from treeprop_ray.schedule.placement import Plan, stages


class BlockMethod(Method):
    """Blocks live in hosts that `owners` names."""

    def network(self, settings: Settings, shape: Shape) -> Blueprint:
        """The network that the settings name."""
        return blueprint(settings, shape)

    def tree(self, settings: Settings) -> Tree:
        """The tree over the blocks; for a shipped network whether or not the data is here."""
        model = settings.model
        if dotted(model.name):
            return self.network(settings, load(settings).shape).tree(settings.split)
        grouping = grouping_of(model, model.layers, settings.split)
        return Tree(grouping.N if grouping else model.layers + 1, settings.split, grouping)

    def assemble(
        self, settings: Settings, shape: Shape, weights: Mapping[str, Tensor]
    ) -> TreeNetwork:
        """The whole tree; a run of a chain has no weights for auxiliary blocks."""
        recipe = self.network(settings, shape)
        tree = recipe.tree(settings.split)
        network = TreeNetwork.from_blueprint(recipe, tree, settings.seed, shape.dtype)
        for name, module in named(network.parts()).items():
            if mine := part_state(weights, name):
                module.load_state_dict(mine)
        network.cast = HALF.get(settings.precision)
        return network

    def owners(self, tree: Tree, plan: Plan) -> dict[Edge, int]:
        """The host of every edge of a chain: runs of blocks; the stem is in the first."""
        cuts = stages(tree, len(plan.names))
        return {STEM: 0, **{edge: k for k, cut in enumerate(cuts) for edge in cut}}

    def still(self, tree: Tree, trained: Collection[str]) -> frozenset[int]:
        """States of the chain before which nothing trains."""
        return still_in_chain(tree, trained)

    def deployed(self, tree: Tree) -> frozenset[str]:
        """Names of the parts of the deployed chain."""
        return frozenset(edge_name(e) for e in (STEM, *tree.path_edges(tree.chain)))

    def score(
        self, crew: Crew, paths: Mapping[str, Sequence[int]], batches: Sequence[Which]
    ) -> dict[str, Score]:
        """Every batch goes along every path, block by block; shared beginnings run once."""
        tree, metrics = crew.job.tree, crew.job.metrics
        owner, plan = self.owners(tree, crew.plan), crew.plan
        edges = {name: tree.path_edges(path)[:-1] for name, path in paths.items()}
        counts: dict[str, list[Any]] = {name: [] for name in paths}
        answers: dict[str, list[Any]] = {name: [] for name in paths}
        head = owner[tree.head]
        for turn, which in enumerate(batches):
            returns = 2 + crew.job.rule.context
            opens = plan.host(owner[STEM], turn)
            z_0, y, *context = crew.ask(opens, BlockHost.opened, which, returns=returns)
            states: dict[tuple[Edge, ...], Any] = {(): z_0}
            for name, along in edges.items():
                for k in range(1, len(along) + 1):
                    key = tuple(along[:k])
                    if key not in states:
                        edge, before = along[k - 1], states[key[:-1]]
                        words = (edge, before, *context)
                        host = plan.host(owner[edge], turn)
                        states[key] = crew.ask(host, BlockHost.through, *words)
                z, at = states[tuple(along)], plan.host(head, turn)
                counts[name].append(crew.ask(at, BlockHost.score, z, y))
                if metrics and isinstance(which, Scoring):
                    answers[name].append(crew.ask(at, BlockHost.answers, z, y))
        return {
            name: Score.of(crew.get(asked), measure(metrics, crew.get(answers[name])))
            if answers[name]
            else Score.of(crew.get(asked))
            for name, asked in counts.items()
        }
