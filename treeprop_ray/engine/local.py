"""Everything in this process: the oracle for every other engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from treeprop_ray.config import Settings
from treeprop_ray.core.network import STEM, TreeNetwork
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rule import Rule, cut
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Batches, DataSet
from treeprop_ray.engine.base import Score, Span, State, StepReport, score_paths
from treeprop_ray.hosts.chain import ChainHost
from treeprop_ray.hosts.probe import probe_parts
from treeprop_ray.hosts.probe_row import combine
from treeprop_ray.hosts.tree import Host
from treeprop_ray.schedule.chain import one_chain_step
from treeprop_ray.schedule.ops import Layout
from treeprop_ray.schedule.probe import probe_calls
from treeprop_ray.schedule.tree import one_step


class LocalEngine:
    """One host that owns the whole network and runs the schedule call by call.

    `method="bp"` is plain backpropagation of the chain: one forward, one loss, one backward.
    """

    def __init__(
        self,
        network: TreeNetwork,
        rule: Rule,
        optimizer: OptimizerRule,
        batches: Batches,
        microbatches: int = 1,
        device: str = "cpu",
        precision: str = "float32",
        method: str = "tree",
    ) -> None:
        self.network, self.tree, self.rule = network, network.tree, rule
        self.optimizer, self.batches = optimizer, batches
        self.pieces = microbatches
        stem_trains = any(p.requires_grad for p in network.stem.parameters())
        common = (batches, stem_trains, device, precision)
        parts = network.parts()
        if method == "tree":
            self.copies = rule.mc_samples
            self.host = Host(self.tree, rule, optimizer, parts, self.tree.nodes, *common)
            layout = Layout.single(self.tree)
            self.calls = one_step(self.tree, rule, layout, stem_trains, microbatches)
        else:
            self.copies = 1
            chain = self.tree.path_edges(self.tree.chain)
            owned = {edge: parts[edge] for edge in (STEM, *chain)}
            self.host = ChainHost(self.tree, rule, optimizer, owned, chain, *common)
            self.calls = one_chain_step(1, stem_trains, microbatches)
        self._last = StepReport()

    def gradients(self, step: int) -> None:
        """The forward and backward waves of a step; gradients stay in the parameters."""
        pieces = cut(step, self.batches.batch * self.copies, self.pieces)
        for call in self.calls:
            self.host.run(call, pieces[call.piece], {})

    def step(self, step: int, report: bool) -> None:
        self.gradients(step)
        self._last = self.host.report(step, norms=report or self.optimizer.clip > 0)
        self.host.apply(step, [self._last.square_norms])

    def reports(self) -> list[StepReport]:
        return [self._last]

    def score(self, paths: Mapping[str, Sequence[int]], split: str) -> dict[str, Score]:
        batches = self.batches.data.batches(split)
        return score_paths(self.tree, paths, batches, self.host.through, self.host.score)

    def clean_loss(self, path: Sequence[int], step: int) -> float:
        batch = [self.batches(step)]
        scored = score_paths(self.tree, {"": path}, batch, self.host.through, self.host.score)
        return scored[""].loss

    def probe(self, batches: int, draws: int) -> dict[str, float]:
        """Measure on held-out batches (probe_row.py: the columns); leaves the run as it is."""
        spine = {str(p[-2]): p for p in self.tree.spine_paths}
        held = [self.batches(-1 - k) for k in range(batches)]
        clean = score_paths(self.tree, spine, held, self.host.through, self.host.score)
        stem_trains = self.host.boundary is not None and self.host.boundary.stem_trains
        calls = probe_calls(self.tree, Layout.single(self.tree), stem_trains, self.pieces)
        calls["tree"] = self.calls
        for part, which, steps in probe_parts(batches, draws, self.rule):
            self.host.probe(part)
            for step in steps:
                pieces = cut(step, self.batches.batch * self.copies, self.pieces)
                for call in calls[which]:
                    self.host.run(call, pieces[call.piece], {})
        found = self.host.probe("end")
        assert found is not None
        places = self.batches.batch * self.copies
        return combine([found], self.tree, self.rule, clean, batches, draws, places)

    def state(self) -> State:
        return self.host.state()

    def load(self, state: State, step: int = 0) -> None:
        self.host.load(*state)

    def spans(self) -> list[Span]:
        return []

    def close(self) -> None:
        """Nothing was started."""


def build(settings: Settings, data: DataSet, total_steps: int) -> LocalEngine:
    """The local engine for the settings."""
    from treeprop_ray.models import blueprint

    plan = blueprint(settings, data)
    tree = Tree(plan.N, settings.split)
    network = TreeNetwork.from_blueprint(plan, tree, settings.seed, data.dtype)
    return over(network, settings, Batches(data, settings.batch, settings.seed), total_steps)


def over(
    network: TreeNetwork, settings: Settings, batches: Batches, total_steps: int
) -> LocalEngine:
    """The local engine over the modules of a network."""
    torch.set_num_threads(settings.threads)
    rule = Rule.of(settings, network.family, batches.data.labels_per_sample)
    optimizer = OptimizerRule.of(settings, total_steps)
    device = pick_device(settings.device)
    if settings.method == "cff":
        from treeprop_ray.hosts.cff import CffEngine

        return CffEngine(
            network, rule, optimizer, batches, settings.cff, device, settings.precision
        )
    kind: type[LocalEngine] = LocalEngine
    if settings.engine == "train":  # inside a worker
        from treeprop_ray.engine.data_parallel import DataParallelEngine

        kind = DataParallelEngine
    return kind(
        network,
        rule,
        optimizer,
        batches,
        settings.microbatches,
        device,
        settings.precision,
        settings.method,
    )


def pick_device(device: str) -> str:
    """`auto` is a GPU when there is one."""
    from treeprop_ray.errors import UserError

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: this machine has no usable GPU; use device=cpu or auto")
    return (
        "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    )
