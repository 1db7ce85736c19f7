"""Everything in this process: the oracle for every other engine, and plain backpropagation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from treeprop_ray.config import Settings
from treeprop_ray.data import Batches, DataSet
from treeprop_ray.engine.base import Score, State, StepReport, score_paths
from treeprop_ray.errors import TrainingError
from treeprop_ray.host import Host
from treeprop_ray.network import STEM, TreeNetwork
from treeprop_ray.objective import head_loss
from treeprop_ray.optim import OptimizerRule
from treeprop_ray.rng import derive
from treeprop_ray.rule import Rule, cut
from treeprop_ray.schedule import Layout, one_step
from treeprop_ray.tree import Tree


class LocalEngine:
    """One host that owns the whole tree and runs the wave schedule call by call."""

    def __init__(
        self,
        network: TreeNetwork,
        rule: Rule,
        optimizer: OptimizerRule,
        batches: Batches,
        microbatches: int = 1,
        device: str = "cpu",
        precision: str = "float32",
    ) -> None:
        self.network, self.tree, self.rule = network, network.tree, rule
        self.optimizer, self.batches = optimizer, batches
        self.pieces = microbatches
        stem_trains = any(p.requires_grad for p in network.stem.parameters())
        self.host = Host(
            self.tree, rule, optimizer, self._parts(), self._nodes(), batches, stem_trains,
            device, precision,
        )  # fmt: skip
        layout = Layout.single(self.tree)
        self.calls = list(one_step(self.tree, rule, layout, stem_trains, microbatches))
        self._last = StepReport()

    def _parts(self) -> dict[tuple[int, int], torch.nn.Module]:
        return self.network.parts()

    def _nodes(self) -> list[int]:
        return list(self.tree.nodes)

    def gradients(self, step: int) -> None:
        """The forward and backward waves of a step; gradients stay in the parameters."""
        pieces = cut(step, self.batches.batch * self.rule.mc_samples, self.pieces)
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
        one = score_paths(
            self.tree, {"": path}, [self.batches(step)], self.host.through, self.host.score
        )
        return one[""].loss

    def state(self) -> State:
        return self.host.state()

    def load(self, state: State) -> None:
        self.host.load(*state)

    def close(self) -> None:
        """Nothing was started."""


class BackpropEngine(LocalEngine):
    """The same chain by plain backpropagation: one forward, one loss, one backward."""

    def _parts(self) -> dict[tuple[int, int], torch.nn.Module]:
        chain = set(self.tree.path_edges(self.tree.chain)) | {STEM}
        return {edge: module for edge, module in self.network.parts().items() if edge in chain}

    def _nodes(self) -> list[int]:
        return []

    def gradients(self, step: int) -> None:
        host = self.host
        chain = [
            host.parts[STEM],
            *(host.parts[e] for e in self.tree.path_edges(self.tree.chain)[:-1]),
        ]
        head = host.parts[self.tree.head]
        total = torch.zeros((), dtype=torch.float64)
        x, y = (t.to(host.device) for t in self.batches(step))
        for piece in cut(step, self.batches.batch, self.pieces):
            z = x[piece.start : piece.stop]
            labels = y[piece.start : piece.stop]
            for i, block in enumerate(chain):
                z = host._run(block, z, derive(self.rule.seed, "chain", step, i, piece.index))
            seed = derive(self.rule.seed, "chain", step, "head", piece.index)
            loss = host._run(partial(head_loss, head, labels=labels, piece=piece), z, seed)
            loss.backward()
            total += loss.detach().double().cpu()
        if not math.isfinite(float(total)):
            raise TrainingError(f"loss ce={float(total)} at the head, step {step}")
        self._ce = float(total)

    def step(self, step: int, report: bool) -> None:
        self.gradients(step)
        self._last = self.host.report(step, norms=report or self.optimizer.clip > 0)
        self._last.losses = {self.tree.N: {"ce": self._ce}}
        self.host.apply(step, [self._last.square_norms])


def build(settings: Settings, data: DataSet, total_steps: int) -> LocalEngine:
    """The local engine for the settings: tree or backpropagation."""
    from treeprop_ray.models import blueprint

    plan = blueprint(settings, data)
    tree = Tree(plan.N, settings.split)
    network = TreeNetwork.from_blueprint(plan, tree, settings.seed, data.dtype)
    rule = Rule.of(settings, plan.family, data.labels_per_sample)
    batches = Batches(data, settings.batch, settings.seed)
    kind = LocalEngine if settings.method == "tree" else BackpropEngine
    torch.set_num_threads(settings.threads)
    return kind(
        network, rule, OptimizerRule.of(settings, total_steps), batches, settings.microbatches,
        pick_device(settings.device), settings.precision,
    )  # fmt: skip


def pick_device(device: str) -> str:
    """`auto` is a GPU when there is one."""
    from treeprop_ray.errors import UserError

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: this machine has no usable GPU; use device=cpu or auto")
    return (
        "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    )
