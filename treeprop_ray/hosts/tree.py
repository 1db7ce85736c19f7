"""A host runs the calls of the schedule for the nodes it owns. One process, one device, no Ray.

The local engine is one host that owns everything; a Ray actor is a host that owns a part.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from treeprop_ray.core.input_first import input_first
from treeprop_ray.core.network import STEM, edge_name, named
from treeprop_ray.core.node import Boundary, Losses, TreeNode, add, at_once
from treeprop_ray.core.optim import OptimizerRule, PartOptimizer
from treeprop_ray.core.rule import Piece, Rule
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.engine.base import StepReport, count
from treeprop_ray.errors import TrainingError
from treeprop_ray.hosts.probe import Gauge, HostProbe
from treeprop_ray.schedule.ops import Call, Op
from treeprop_ray.schedule.probe import PROBE_VERBS

Batch = Callable[[int], tuple[Tensor, Tensor]]  # step -> the whole batch (x, y)
Held = dict[str, Tensor | None]  # tensors by name (schedule.py); an adjoint may be absent


class Host:
    """The parts of a tree that live together, their gradients and their optimizer."""

    def __init__(
        self,
        tree: Tree,
        rule: Rule,
        optimizer: OptimizerRule,
        parts: Mapping[Edge, nn.Module],
        nodes: Iterable[int],
        batch: Batch | None,
        stem_trains: bool,
        device: str = "cpu",
        precision: str = "float32",
    ) -> None:
        self.tree, self.rule, self.device = tree, rule, torch.device(device)
        self.bf16 = precision == "bf16"
        self.parts = {edge: module.to(self.device).train() for edge, module in parts.items()}
        self.batch = batch
        self.boundary: Boundary | None = None
        if batch is not None:
            head = self.parts.get(tree.head)  # absent in the first of several chain stages
            self.boundary = Boundary(tree, self.parts[STEM], head, rule, self._run)
        self.nodes: dict[int, TreeNode] = {}
        for n in nodes:
            node = tree.nodes[n]
            right = None if tree.is_spine(node) else self.parts[node.right]
            self.nodes[n] = TreeNode(
                tree, node, self.parts[node.left], right, rule, stem_trains, self._run, self._back
            )
        self.optimizer = PartOptimizer(named(self.parts), optimizer, first=edge_name(STEM))
        self.held: dict[int, Held] = {}  # per piece of the batch
        self.current: tuple[int, Tensor, Tensor] | None = None  # the batch of this step
        self.at = ""  # which node is at work
        self.awaited = False  # whether other hosts wait for the call under way
        self.later: list[Callable[[], None]] = []  # what nobody waits for
        self.stem_alone = False  # whether a step begins with a call of the stem alone
        self.gauge: Gauge | None = None  # while a probe is under way
        self.data_seconds = 0.0  # spent on getting batches, since the host was made

    def _run(self, block: Callable[[Tensor], Tensor], z: Tensor, seed: int) -> Tensor:
        """Run a block; randomness inside it (dropout) comes from `seed` alone."""
        # torch.manual_seed would also queue a seed for absent devices, at 0.3 ms a call
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        with self._autocast():
            return block(z)

    def _back(self, out: Tensor, slope: Tensor, leaf: Tensor) -> None:
        """Backward through a block; while others wait, only as far as they need it."""
        if self.awaited:
            self.later.append(input_first(out, slope, leaf))
        else:
            at_once(out, slope, leaf)

    def catch_up(self) -> None:
        """What earlier calls have left for later."""
        for rest in self.later:
            rest()
        self.later.clear()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if not self.bf16:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # -- training -----------------------------------------------------------------------------

    def run(self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Do a call; returns the tensors that other hosts need."""
        if call.phase == "stem":
            self.stem_alone = True
        else:
            self.catch_up()
        self.awaited = bool(call.packets)
        held = self.held.setdefault(piece.index, {})
        for name, t in inputs.items():
            held[name] = None if t is None else t.to(self.device, non_blocking=True)
        for op in call.ops:
            self.at = self._where(op.n) if op.n in self.nodes else ""
            self._do(op, held, piece)
        out = {name: held[name] for name in call.outputs}
        if call.last:
            del self.held[piece.index]
            if self.boundary:
                self.boundary.labels.pop(piece.index, None)
        return out

    def _do(self, op: Op, held: Held, piece: Piece) -> None:
        """One op; each verb is a method of TreeNode or Boundary, or belongs to the probe."""
        if op.verb in PROBE_VERBS:
            assert self.gauge is not None
            self.gauge.do(op, held, piece)
            return
        if op.verb in ("open", "close", "head"):
            assert self.boundary is not None
            if op.verb == "open":
                held["z0"] = self.boundary.open(*self._places(piece), piece)
            elif op.verb == "head":
                held[op.writes[0]] = self.boundary.answer(op.n, _there(held, op.reads[0]), piece)
            else:
                self.boundary.close(held[op.reads[0]], piece)
            return
        node = self.nodes[op.n]
        if op.verb == "lift":
            held[op.writes[0]] = node.lift(_there(held, op.reads[0]), piece)
        elif op.verb == "answer":
            node.answer(_there(held, op.reads[0]), piece)
        elif op.verb == "receive":
            node.receive(_there(held, op.reads[0]), piece)
        elif op.verb == "settle":
            held[op.writes[0]] = node.settle(piece)
        else:
            self._backward(node, held, piece)

    def _backward(self, node: TreeNode, held: Held, piece: Piece) -> None:
        """Add up what the children handed up, go back through the node, hand up the sums."""
        left, right = self.tree.left_child(node.node), self.tree.right_child(node.node)
        from_left = (held.get(f"l{left.n}"), held.get(f"r{left.n}")) if left else (None, None)
        from_right = (held.get(f"l{right.n}"), held.get(f"r{right.n}")) if right else (None, None)
        adj_l, adj_r = node.backward(add(from_left[1], from_right[0]), piece)
        held[f"l{node.node.n}"] = add(adj_l, from_left[0])
        held[f"r{node.node.n}"] = add(adj_r, from_right[1])

    def _places(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The piece's samples; `mc_samples` copies of the batch stand one after another."""
        assert self.batch is not None
        if self.current is None or self.current[0] != piece.step:
            began = time.perf_counter()
            x, y = (t.to(self.device, non_blocking=True) for t in self.batch(piece.step))
            self.data_seconds += time.perf_counter() - began
            copies = self.rule.mc_samples
            if copies > 1:
                x, y = torch.cat([x] * copies), torch.cat([y] * copies)
            self.current = (piece.step, x, y)
        _, x, y = self.current
        return x[piece.start : piece.stop], y[piece.start : piece.stop]

    def report(self, step: int, norms: bool) -> StepReport:
        """Losses (and gradient norms) of the step; NaN or Inf ends the run here."""
        self.catch_up()
        terms = [
            (n, name, value)
            for n, losses in self.owned_losses()
            for name, value in losses.take().items()
        ]
        out = StepReport(data_seconds=self.data_seconds)
        if terms:
            values = torch.stack([value.double() for _, _, value in terms]).tolist()
            for (n, name, _), value in zip(terms, values, strict=True):
                if not math.isfinite(value):
                    raise TrainingError(f"loss {name}={value} at {self._where(n)}, step {step}")
                out.losses.setdefault(n, {})[name] = value
        if norms:
            out.square_norms = self.optimizer.square_norms()
            for part, value in out.square_norms.items():
                if not math.isfinite(value):
                    raise TrainingError(self._bad_gradient(part, value, step))
        return out

    def owned_losses(self) -> list[tuple[int, Losses]]:
        """The loss terms that arise here, by node."""
        found = [(n, node.losses) for n, node in self.nodes.items()]
        return found + (list(self.boundary.losses.items()) if self.boundary else [])

    def _where(self, n: int) -> str:
        if n == self.tree.N:
            return "the head, level 0"
        return f"node {n}, level {self.tree.nodes[n].level}"

    def _bad_gradient(self, part: str, value: float, step: int) -> str:
        owner = next(
            (n for n in self.nodes.values() if part in map(edge_name, (n.node.left, n.node.right))),
            None,
        )
        where = self._where(owner.node.n) if owner else "the boundary, level 0"
        return f"gradient of block {part} is {value} at {where}, step {step}"

    def apply(self, step: int, square_norms: Iterable[Mapping[str, float]] | None) -> None:
        """Optimizer step; with clipping `square_norms` are those of all hosts.

        When others wait for z_0 of the next batch, only the stem is updated at once.
        """
        self.later += self.optimizer.turns(step, square_norms)
        if self.stem_alone and self.later:
            self.later.pop(0)()
        else:
            self.catch_up()

    def probe(self, part: str) -> HostProbe | None:
        """Begin a part of a probe (measure.py); "end" returns what was measured."""
        self.catch_up()
        if part == "tree":
            self.gauge = Gauge(self)
        assert self.gauge is not None
        found = self.gauge.turn(part)
        if part == "end":
            self.gauge = None
        return found

    # -- evaluation, state ----------------------------------------------------------------------

    @torch.no_grad()
    def through(self, edge: Edge, z: Tensor) -> Tensor:
        """A block in evaluation mode: no noise, no dropout."""
        self.catch_up()
        module = self.parts[edge]
        module.eval()
        with self._autocast():
            out: Tensor = module(z.to(self.device))
        module.train()
        return out

    @torch.no_grad()
    def score(self, z: Tensor, y: Tensor) -> tuple[float, int, int]:
        """Summed cross-entropy, number of correct labels and number of labels at the head."""
        self.catch_up()
        head = self.parts[self.tree.head].eval()
        with self._autocast():
            found = count(head, z.to(self.device), y)
        head.train()
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(weights and buffers, optimizer state), keyed by edge."""
        self.catch_up()
        weights = {
            f"{edge_name(edge)}/{k}": v.detach().cpu().clone()
            for edge, module in self.parts.items()
            for k, v in module.state_dict().items()
        }
        return weights, {k: v.clone() for k, v in self.optimizer.state().items()}

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Take the own parts out of a full or partial state."""
        for edge, module in self.parts.items():
            prefix = edge_name(edge) + "/"
            mine = {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}
            module.load_state_dict(mine)
        self.optimizer.load(optimizer)
        self.forget()

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        self.held.clear()
        self.later.clear()
        if self.gauge:
            self.gauge.restore()
            self.gauge = None
        for module in self.parts.values():
            module.zero_grad(set_to_none=True)
        for node in self.nodes.values():
            node.saved.clear()
        if self.boundary:
            self.boundary.z_0.clear()
            self.boundary.labels.clear()
        for _, losses in self.owned_losses():
            losses.take()


def _there(held: Held, name: str) -> Tensor:
    value = held[name]
    assert value is not None, name
    return value
