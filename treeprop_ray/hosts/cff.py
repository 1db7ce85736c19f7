"""Contrastive forward-forward with margin (CFF+M): every layer learns from a loss of its own.

Stage 1, steps before `first`: two views of every image; layer l gets the detached output of layer
l - 1, has its contrastive loss (contrast.py) and its own AdamW. The stem learns with layer 1. At
the end of each epoch the last layer's loss on the validation split is taken; the weights of the
lowest are kept. Stage 2: these weights, frozen, and one view; the head learns by cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treeprop_ray.config import Cff
from treeprop_ray.core.contrast import contrastive_loss, margin_at
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.node import Losses
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rng import derive
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.engine import transport
from treeprop_ray.engine.base import State, StepReport
from treeprop_ray.engine.local import LocalEngine
from treeprop_ray.hosts.tree import Held, Host
from treeprop_ray.schedule.cff import one_cff_step
from treeprop_ray.schedule.ops import Op

if TYPE_CHECKING:
    from treeprop_ray.data import Batches

KEPT = "/kept"  # ends the names of kept weights among the optimizer's slots
BEST = "cff/validation/kept"  # the loss that they had


class CffHost(Host):
    """A run of consecutive layers, with the stem if it has the first and the head if the last."""

    def __init__(
        self,
        tree: Tree,
        rule: Rule,
        optimizer: OptimizerRule,
        parts: Mapping[Edge, nn.Module],
        blocks: Sequence[Edge],
        batch: Batches | None,
        cff: Cff,
        device: str = "cpu",
        precision: str = "float32",
    ) -> None:
        places = [r for _, r in blocks]
        self.losses = {place: Losses() for place in places}
        self.outs: dict[int, Tensor] = {}  # layer -> its output with its graph
        self.kept: dict[str, Tensor] = {}
        super().__init__(tree, rule, optimizer, parts, [], batch, False, device, precision)
        assert optimizer.second is not None
        self.first, self.tau = optimizer.second[0], cff.tau
        self.layers = [r for r in places if r < tree.N]
        depth = tree.N - 1
        self.margin = {
            r: margin_at(r - 1, depth, cff.margin, cff.m_first, cff.m_last)
            for r in range(1, tree.N)
        }

    def owned_losses(self) -> list[tuple[int, Losses]]:
        """By layer; the head's cross-entropy is that of state N."""
        return list(self.losses.items())

    def _where(self, n: int) -> str:
        return "the head" if n == self.tree.N else f"layer {n}"

    def _bad_gradient(self, part: str, value: float, step: int) -> str:
        return f"gradient of block {part} is {value}, step {step}"

    def run(self, call: Any, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Do a call; the first one of stage 2 puts the kept weights in place."""
        if piece.step >= self.first and self.kept:
            for edge, module in self._layer_parts():
                prefix = edge_name(edge) + "/"
                mine = {
                    k.removeprefix(prefix): v for k, v in self.kept.items() if k.startswith(prefix)
                }
                module.load_state_dict(mine)
            self.kept = {}
        return super().run(call, piece, inputs)

    def _do(self, op: Op, held: Held, piece: Piece) -> None:
        layers_learn = piece.step < self.first
        if op.verb == "open":
            held["z0"], held["y"] = self._views(piece.step, 2 if layers_learn else 1)
        elif op.verb == "ahead":
            z = held[op.reads[0]]
            assert z is not None
            held[op.writes[0]] = (
                self._ahead(op.n, z, piece) if layers_learn else self._frozen(op.n, z)
            )
        elif op.verb == "learn" and layers_learn:
            y = held["y"]
            assert y is not None
            self._learn(op.n, y)
        elif op.verb == "classify" and not layers_learn:
            z, y = held[op.reads[0]], held["y"]
            assert z is not None and y is not None
            self._classify(z, y, piece)

    def _views(self, step: int, views: int) -> tuple[Tensor, Tensor]:
        """Augmentations of the step's images one after another, and the labels of all rows."""
        batch: Any = self.batch
        pairs = [batch(step, view) for view in range(views)]
        x, y = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        return x.to(self.device), y.to(self.device)

    def _ahead(self, r: int, z: Tensor, piece: Piece) -> Tensor:
        """Layer r on its detached input; the stem is a part of layer 1."""
        z = z.detach()
        if r == 1:
            z = self._run(self.parts[STEM], z, self._seed(STEM, piece))
        self.outs[r] = self._run(self.parts[r - 1, r], z, self._seed((r - 1, r), piece))
        return self.outs[r].detach()

    def _frozen(self, r: int, z: Tensor) -> Tensor:
        return self.through((r - 1, r), self.through(STEM, z) if r == 1 else z)

    def _learn(self, r: int, y: Tensor) -> None:
        loss, clamped = contrastive_loss(self.outs.pop(r), y, self.margin[r], self.tau)
        loss.backward()
        self.losses[r].add("contrast", loss)
        self.losses[r].add("clamped", clamped)

    def _classify(self, z: Tensor, y: Tensor, piece: Piece) -> None:
        head = self.parts[self.tree.head]
        loss_of = partial(head_loss, head, labels=y, piece=piece)
        loss = self._run(loss_of, z.detach(), self._seed(self.tree.head, piece))
        loss.backward()
        self.losses[self.tree.N].add("ce", loss)

    def _seed(self, edge: Edge, piece: Piece) -> int:
        return derive(self.rule.seed, "cff", piece.step, *edge)

    # -- which weights stage 2 gets -----------------------------------------------------------

    @torch.no_grad()
    def validation_loss(self, out: Any, labels: Any) -> float:
        """The last layer's loss on what it gave for a validation batch."""
        z, y = (transport.from_array(value) for value in (out, labels))
        assert z is not None and y is not None
        loss, _ = contrastive_loss(z, y.to(z.device), self.margin[self.tree.N - 1], self.tau)
        return float(loss)

    def keep(self) -> None:
        """Remember the layers' weights."""
        self.kept = {
            f"{edge_name(edge)}/{k}": v.detach().clone()
            for edge, module in self._layer_parts()
            for k, v in module.state_dict().items()
        }

    def _layer_parts(self) -> list[tuple[Edge, nn.Module]]:
        return [(e, module) for e, module in self.parts.items() if e != self.tree.head]

    def state(self) -> State:
        """Kept weights are stored beside the optimizer's slots, by the same keys."""
        weights, optimizer = super().state()
        return weights, {**optimizer, **{k + KEPT: v.cpu() for k, v in self.kept.items()}}

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Take the own parts out of a full or partial state."""
        mine = {edge_name(edge) for edge, _ in self._layer_parts()}
        self.kept = {
            k.removesuffix(KEPT): v.clone().to(self.device)
            for k, v in optimizer.items()
            if k.endswith(KEPT) and k.split("/")[0] in mine
        }
        super().load(weights, {k: v for k, v in optimizer.items() if not k.endswith(KEPT)})

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.outs.clear()


class Selection:
    """When the layers are validated, and the lowest loss so far."""

    def __init__(self, first: int, per_epoch: int, batches: int) -> None:
        self.first, self.per_epoch, self.batches = first, per_epoch, batches
        self.best = math.inf
        self.last: float | None = None  # of the last step, if it was validated then

    def due(self, done: int) -> bool:
        """After `done` steps: at the end of an epoch of stage 1, and of stage 1 itself."""
        ends = done % self.per_epoch == 0 or done == self.first
        return self.batches > 0 and done <= self.first and ends

    def better(self, loss: float) -> bool:
        """Note a loss; whether it is the lowest."""
        self.last = loss
        if loss < self.best:
            self.best = loss
            return True
        return False

    def add_to(self, state: State) -> State:
        """The lowest loss as a part of a run's state."""
        if self.best < math.inf:
            state[1][BEST] = torch.tensor(self.best, dtype=torch.float64)
        return state

    def take_from(self, state: State) -> None:
        """The lowest loss of a state that is taken up."""
        self.best = float(state[1][BEST]) if BEST in state[1] else math.inf

    def report(self, reports: list[StepReport], layer: int) -> list[StepReport]:
        """Reports of a step with the validation loss, if there is one."""
        if self.last is None:
            return reports
        return [*reports, StepReport(losses={layer: {"validation": self.last}})]


class CffEngine(LocalEngine):
    """CFF+M in one process."""

    host: CffHost

    def __init__(
        self,
        network: Any,
        rule: Rule,
        optimizer: OptimizerRule,
        batches: Batches,
        cff: Cff,
        device: str = "cpu",
        precision: str = "float32",
    ) -> None:
        self.network, self.tree, self.rule = network, network.tree, rule
        self.optimizer, self.batches = optimizer, batches
        self.pieces = self.copies = 1
        chain = self.tree.path_edges(self.tree.chain)
        owned = {edge: network.parts()[edge] for edge in (STEM, *chain)}
        self.host = CffHost(
            self.tree, rule, optimizer, owned, chain, batches, cff, device, precision
        )
        self.calls = one_cff_step([chain])
        self.selection = Selection(
            self.host.first, batches.per_epoch, batches.data.batch_counts["validation"]
        )
        self._last = StepReport()

    def step(self, step: int, report: bool) -> None:
        super().step(step, report)
        self.selection.last = None
        if self.selection.due(step + 1) and self.selection.better(self.validation()):
            self.host.keep()

    def validation(self) -> float:
        """The last layer's mean loss over the validation split."""
        total = 0.0
        for index in range(self.selection.batches):
            x, y = self.batches.evaluation("views", index)
            z = self.host.through(STEM, x)
            for r in self.host.layers:
                z = self.host.through((r - 1, r), z)
            total += self.host.validation_loss(z, y)
        return total / self.selection.batches

    def reports(self) -> list[StepReport]:
        return self.selection.report([self._last], self.tree.N - 1)

    def state(self) -> State:
        return self.selection.add_to(super().state())

    def load(self, state: State, step: int = 0) -> None:
        self.selection.take_from(state)
        super().load(state, step)
