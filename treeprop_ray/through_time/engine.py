"""TreeProp-TT and BPTT in one process, behind the protocol that the train command drives."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treeprop_ray.core.bptt import BPTT, fused, unrolled
from treeprop_ray.core.cells import GRUCell
from treeprop_ray.core.jumps import jumps
from treeprop_ray.core.lookahead import Jump, Roll, look_names
from treeprop_ray.core.optim import OptimizerRule, PartOptimizer
from treeprop_ray.core.rule import Piece, cut
from treeprop_ray.core.time_tree import Depth, Readout, Terms, TimeRule, first_states
from treeprop_ray.core.tree import Tree
from treeprop_ray.engine.base import Engine, Score, Span, State, StepReport
from treeprop_ray.errors import TrainingError
from treeprop_ray.models.rnn import READOUT, TimeNetwork, cell_name

if TYPE_CHECKING:
    from treeprop_ray.config import Settings
    from treeprop_ray.data import Batches, DataSet

BOOST = 3.0  # not recipe=paper: learning rate of the deployed cell over that of the others


def optimizer_rule(settings: Settings, total_steps: int) -> OptimizerRule:
    """The optimizer of a recurrent run; `recipe` changes it for the tree only."""
    rule = OptimizerRule.of(settings, total_steps)
    if settings.method == "tree" and settings.time.recipe != "paper":
        return replace(rule, factors=((cell_name(0), BOOST),), clip_each=True)
    return rule


class Owner:
    """Some parts of a recurrent network with their optimizer, device and precision."""

    def __init__(
        self, parts: Mapping[str, nn.Module], rule: OptimizerRule, device: str, precision: str
    ) -> None:
        self.device, self.bf16 = torch.device(device), precision == "bf16"
        self.parts = {name: module.to(self.device) for name, module in parts.items()}
        self.optimizer = PartOptimizer(self.parts, rule)
        self._terms: dict[int, Terms] = {}

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """bf16: the products in bfloat16."""
        if not self.bf16:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def note(self, depth: int, terms: Terms) -> None:
        """Add a piece's loss terms to those of the step."""
        mine = self._terms.setdefault(depth, {})
        for name, value in terms.items():
            mine[name] = mine[name] + value if name in mine else value

    def report(self, step: int, norms: bool) -> StepReport:
        """Losses (and gradient norms) of the step by depth; NaN or Inf ends the run here."""
        found = [(d, k, v) for d, terms in self._terms.items() for k, v in terms.items()]
        self._terms = {}
        out = StepReport()
        values = torch.stack([v for _, _, v in found]).tolist() if found else []
        for (d, name, _), value in zip(found, values, strict=True):
            if not math.isfinite(value):
                raise TrainingError(f"loss {name}={value} at depth {d}, step {step}")
            out.losses.setdefault(d, {})[name] = value
        if norms:
            out.square_norms = self.optimizer.square_norms()
            for part, value in out.square_norms.items():
                if not math.isfinite(value):
                    raise TrainingError(f"gradient of {part} is {value}, step {step}")
        return out

    def apply(self, step: int, square_norms: Iterable[Mapping[str, float]] | None) -> None:
        """Optimizer step; with global clipping `square_norms` are those of all owners."""
        self.optimizer.step(step, square_norms)

    def state(self) -> State:
        """(weights, optimizer state) keyed by part."""
        weights = {
            f"{name}/{k}": v.detach().cpu().clone()
            for name, module in self.parts.items()
            for k, v in module.state_dict().items()
        }
        return weights, {k: v.clone() for k, v in self.optimizer.state().items()}

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Take the own parts out of a full or partial state."""
        for name, module in self.parts.items():
            prefix = f"{name}/"
            mine = {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}
            module.load_state_dict(mine)
        self.optimizer.load(optimizer)
        self.forget()

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        self._terms = {}
        for module in self.parts.values():
            module.zero_grad(set_to_none=True)


class TimeEngine(ABC):
    """What the local engines share: batches, pieces, optimizer step, scores, state."""

    def __init__(
        self,
        network: TimeNetwork,
        optimizer: OptimizerRule,
        batches: Batches,
        pieces: int = 1,
        device: str = "cpu",
        precision: str = "float32",
    ) -> None:
        self.network, self.batches, self.pieces = network, batches, pieces
        self.tree: Tree = network.tree
        self.owner = Owner(network.parts(), optimizer, device, precision)
        self.clips = optimizer.clips_globally
        self._last = StepReport()

    @abstractmethod
    def gradients(self, x_BNS: Tensor, y: Tensor, piece: Piece) -> None:
        """Add the gradients of a piece of the batch."""

    def step(self, step: int, report: bool) -> None:
        x, y = (t.to(self.owner.device) for t in self.batches(step))
        for piece in cut(step, len(x), self.pieces):
            self.gradients(x[piece.start : piece.stop], y[piece.start : piece.stop], piece)
        self._last = self.owner.report(step, norms=report or self.clips)
        self.owner.apply(step, [self._last.square_norms])

    def reports(self) -> list[StepReport]:
        return [self._last]

    def score(self, paths: Mapping[str, Sequence[int]], split: str) -> dict[str, Score]:
        with self.owner.autocast():
            return self.network.score(paths, self.batches.data.batches(split))

    def clean_loss(self, path: Sequence[int], step: int) -> float:
        with self.owner.autocast():
            return self.network.score({"": path}, [self.batches(step)])[""].loss

    def state(self) -> State:
        return self.owner.state()

    def load(self, state: State, step: int = 0) -> None:
        self.owner.load(*state)

    def spans(self) -> list[Span]:
        return []

    def close(self) -> None:  # noqa: B027 (nothing to close is the rule here)
        """Nothing was started."""


class TreeEngine(TimeEngine):
    """TreeProp-TT: all depths ahead, one question to the readout, all depths back."""

    def __init__(self, rule: TimeRule, network: TimeNetwork, *rest: object) -> None:
        super().__init__(network, *rest)  # type: ignore[arg-type]
        cells = self.owner.parts
        self.depths = [
            Depth(cells[cell_name(d)], d, rule)  # type: ignore[arg-type]
            for d in reversed(range(int(rule.lookahead), rule.depth))
        ]
        self.names = [(depth.d, "ce") for depth in self.depths]
        readout = cells[READOUT]
        assert isinstance(readout, nn.Linear)
        self.readout = Readout(readout)
        self.roll: Roll | None = None
        if rule.lookahead:
            self.roll = Roll(cells[cell_name(0)], rule.depth)  # type: ignore[arg-type]
            self.jumps = [
                Jump(cells[cell_name(d)], d, rule.depth)  # type: ignore[arg-type]
                for d in jumps(rule.depth, self.roll.W)
            ]

    def gradients(self, x_BNS: Tensor, y: Tensor, piece: Piece) -> None:
        with torch.no_grad(), self.owner.autocast():
            labels, total = self.readout.onehot(y), piece.total
            states, hats = first_states(x_BNS, self.readout.module.in_features), []
            for depth in self.depths:
                states, hat = depth.ahead(x_BNS, states)
                hats.append(hat)
            if hats:  # not with the lookahead at D = 1
                answers = self.readout.answer(self.names, torch.stack(hats), labels, total)
                for depth, answer in zip(self.depths, answers.unbind(), strict=True):
                    self.owner.note(depth.d, depth.back(answer, total))
            if self.roll:
                ends = self.roll.ahead(x_BNS)
                for jump in self.jumps:
                    ends = jump.ahead(x_BNS, ends)
                slope = self.readout.answer(look_names(len(ends)), ends, labels, total)
                for jump in reversed(self.jumps):
                    slope = jump.back(slope)
                self.roll.back(slope)
            for d, terms in self.readout.settle(labels, total):
                self.owner.note(d, terms)


class BPTTEngine(TimeEngine):
    """Backpropagation through time of the deployed network."""

    def __init__(self, torch_gru: bool, network: TimeNetwork, *rest: object) -> None:
        super().__init__(network, *rest)  # type: ignore[arg-type]
        cell, readout = self.owner.parts[cell_name(0)], self.owner.parts[READOUT]
        if torch_gru:
            assert isinstance(cell, GRUCell)
            roll = fused(cell)
        else:
            roll = unrolled(cell)  # type: ignore[arg-type]
        self.bptt = BPTT(roll, readout, self.owner.autocast)

    def gradients(self, x_BNS: Tensor, y: Tensor, piece: Piece) -> None:
        self.owner.note(0, {"ce": self.bptt.gradients(x_BNS, y, piece.total)})


def time_rule(settings: Settings) -> TimeRule:
    """The part of the settings that is about the time tree."""
    time = settings.time
    return TimeRule(time.depth, time.sweeps, time.lambda_cons, time.recipe == "lookahead")


def build(settings: Settings, data: DataSet, total_steps: int) -> Engine:
    """The engine for a recurrent run."""
    if settings.engine == "ray":
        from treeprop_ray.through_time import distributed

        return distributed.build(settings, data, total_steps)
    return build_local(settings, data, total_steps)


def build_local(settings: Settings, data: DataSet, total_steps: int) -> TimeEngine:
    """The engine in this process: tree, or backpropagation through time."""
    from treeprop_ray.data import Batches
    from treeprop_ray.engine.local import pick_device

    torch.set_num_threads(settings.threads)
    common = (
        TimeNetwork.of(settings, data),
        optimizer_rule(settings, total_steps),
        Batches(data, settings.batch, settings.seed),
        settings.microbatches,
        pick_device(settings.device),
        settings.precision,
    )
    if settings.method == "tree":
        return TreeEngine(time_rule(settings), *common)
    return BPTTEngine(settings.method == "bptt_fused", *common)
