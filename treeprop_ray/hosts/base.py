"""A host: parts of a network that live together on one device, with their gradients and optimizer.

A host runs the calls of the schedule for what it owns. The local engine is one host that owns
everything; a Ray actor is a host that owns a share. What a call's ops mean is the business of the
hosts built on this one: each has a table of verbs.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from treeprop_ray.core import devices
from treeprop_ray.core.input_first import input_first
from treeprop_ray.core.network import part_state
from treeprop_ray.core.node import Losses, at_once
from treeprop_ray.core.optim import PartOptimizer
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import Piece
from treeprop_ray.core.states import Spec
from treeprop_ray.data.batches import Batches
from treeprop_ray.errors import TrainingError
from treeprop_ray.hosts.compiled import Compiled
from treeprop_ray.hosts.copied import Copied
from treeprop_ray.schedule.copies import Copy
from treeprop_ray.schedule.ops import Call, Op

Held = dict[str, Tensor | None]  # tensors by name (schedule/); an adjoint may be absent
Verb = Callable[[Op, Held, Piece], None]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
Result = TypeVar("Result")
State = tuple[dict[str, Tensor], dict[str, Tensor]]  # (weights, optimizer), keyed by part


@dataclass
class StepReport:
    """What a host tells about a step: unweighted loss terms by place, squared norms by part, of
    corrections and what they correct by place, and the seconds it has spent so far, over all steps,
    on getting training batches."""

    losses: dict[int, dict[str, float]] = field(default_factory=dict)
    square_norms: dict[str, float] = field(default_factory=dict)
    sizes: dict[int, dict[str, float]] = field(default_factory=dict)
    data_seconds: float = 0.0


@dataclass(frozen=True)
class Share:
    """What a host is given: its parts, their optimizer, the batches if it opens them, a device."""

    parts: Mapping[str, nn.Module]
    optimizer: OptimizerRule
    batches: Batches | None = None
    device: str = "cpu"
    precision: str = "float32"
    backend: str = ""  # of torch.compile; empty: blocks are not compiled
    context: Spec | None = None  # of what the stem gives to all blocks besides z_0
    copy: Copy = Copy()


class AtHand(NamedTuple):
    """A batch, or the own places of it."""

    step: int
    x: Tensor
    y: Tensor
    labels: Tensor | None  # of the whole batch, as the data gave them; None: not read
    first: int  # the place of the first row
    total: int  # places of the whole batch


class Host(Copied):
    """Parts by name, their optimizer, and how calls are run, reported and applied."""

    leads = ""  # the part whose update goes ahead of the others'
    weighs_labels = False  # whether a loss needs to see all labels of a batch

    def __init__(self, share: Share) -> None:
        self.device, self.half = devices.gpus.device(share.device), HALF.get(share.precision)
        self.parts = {name: m.to(self.device).train() for name, m in share.parts.items()}
        self.optimizer = PartOptimizer(self.parts, share.optimizer, self.leads)
        self.compiled = Compiled(self.parts.values(), share.backend) if share.backend else None
        self.batches = share.batches
        self.verbs: dict[str, Verb] = {}
        self.losses: dict[int, Losses] = {}  # by place: a node, a layer, a depth
        self.sizes: dict[int, Losses] = {}  # tree: of corrections (core/node.py)
        self.held: dict[int, Held] = {}  # per piece of the batch
        self.current: AtHand | None = None  # the batch of this step
        self.repeats = 1  # how often it stands there
        self.place: int | None = None  # where in the network work is going on
        self.awaited = False  # whether other hosts wait for the call under way
        self.later: list[Callable[[], None]] = []  # what nobody waits for
        self.data_seconds = 0.0  # spent on getting batches, since the host was made
        self.begin_copy(share.copy)

    # -- blocks -------------------------------------------------------------------------------

    def run_block(self, block: Callable[[Tensor], Tensor], z: Tensor, seed: int | None) -> Tensor:
        """Run a block; randomness inside (dropout) comes from `seed` alone. None: there is none."""
        if self.compiled:
            return self.compiled.guarded(lambda: self._run_block(block, z, seed))
        return self._run_block(block, z, seed)

    def tried(self, run: Callable[[], Result]) -> Result:
        """Run something that may be compiled on the way, and cannot always be."""
        return self.compiled.guarded(run) if self.compiled else run()

    def _run_block(self, block: Callable[[Tensor], Tensor], z: Tensor, seed: int | None) -> Tensor:
        if seed is not None:
            # torch.manual_seed would also queue a seed for absent devices, at 0.3 ms a call
            torch.default_generator.manual_seed(seed)
            if devices.gpus.is_gpu(self.device):
                devices.gpus.seed(seed)
        if self.half is None:
            return block(z)
        with self.autocast():
            return block(z)

    def go_back(self, out: Tensor, slope: Tensor, leaf: Tensor) -> None:
        """Backward through a block; while others wait, only as far as they need it."""
        if self.awaited and not self.compiled:  # what is compiled goes back as one piece
            rest = input_first(out, slope, leaf)
            self.later.append(self.reduction.kept(rest) if self.reduction else rest)
        else:
            at_once(out, slope, leaf)

    def catch_up(self) -> None:
        """What earlier calls have left for later."""
        for rest in self.later:
            rest()
        self.later.clear()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """bf16, fp16: the products in 16 bits."""
        if self.half is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.half)

    def scale(self) -> float:
        """The factor on all losses (fp16)."""
        return self.optimizer.scale.value

    # -- a step -------------------------------------------------------------------------------

    def run(self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Do a call; returns the tensors that other hosts need."""
        self.begin(call)
        self.awaited = bool(call.packets)
        held = self.held.setdefault(piece.index, {})
        for name, t in inputs.items():
            held[name] = None if t is None else t.to(self.device, non_blocking=True)
        if self.reduction:
            for i, op in enumerate(call.ops):
                self.place = op.n
                with self.noting(call.order + i, piece):
                    self.verbs[op.verb](op, held, piece)
        else:
            verbs = self.verbs
            for op in call.ops:
                self.place = op.n
                verbs[op.verb](op, held, piece)
        outputs = {name: held[name] for packet in call.packets for name in packet}
        if call.last:
            del self.held[piece.index]
            with self.noting(call.order + len(call.ops) - 1, piece):
                self.end_piece(piece)
        return outputs

    def begin(self, call: Call) -> None:
        """Before the ops of a call."""
        self.catch_up()

    def end_piece(self, piece: Piece) -> None:
        """After the host's last call for a piece."""

    @property
    def at(self) -> str:
        """Where work is going on, or failed, in words."""
        return "" if self.place is None else self.where(self.place)

    def where(self, place: int) -> str:
        """A place in words, for errors; empty where the call itself says it."""
        return ""

    def places(self, piece: Piece, copies: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a piece; `copies` of the batch stand one after another."""
        if self.current is None or self.current.step != piece.step:
            self.repeats = copies
            began = time.perf_counter()
            self.current = self._read(piece, copies)
            self.data_seconds += time.perf_counter() - began
        at = self.current
        rows = slice(piece.start - at.first, piece.stop - at.first)
        return at.x[rows], at.y[rows]

    def fetch(self, piece: Piece) -> None:
        """Read a batch before it is asked for, if this host has read one before."""
        if self.current is not None:
            self.places(piece, self.repeats)

    def _read(self, piece: Piece, copies: int) -> AtHand:
        assert self.batches is not None
        mine = range(piece.total) if piece.held else self.copy.places(piece.total)
        if len(mine) < piece.total:
            rows = torch.arange(mine.start, mine.stop) % (piece.total // copies)
            x, y, labels = self.batches.some(piece.step, rows, self.weighs_labels)
        else:
            x, y = self.batches.get(piece.held) if piece.held else self.batches(piece.step)
            labels = y
            if copies > 1:
                x, y = torch.cat([x] * copies), torch.cat([y] * copies)
        x, y = (t.to(self.device, non_blocking=True) for t in (x, y))
        return AtHand(piece.step, x, y, labels, mine.start, piece.total)

    def report(self, step: int, norms: bool) -> StepReport:
        """Losses (and gradient norms) of the step; NaN or Inf ends the run here."""
        self.catch_up()
        terms = [
            (place, name, value)
            for place, losses in self.losses.items()
            for name, value in losses.take().items()
        ]
        terms.sort(key=lambda term: term[1] == "ce")  # what goes wrong before the head is named
        report = StepReport(data_seconds=self.data_seconds)
        if terms:
            values = torch.stack([value for _, _, value in terms]).double().tolist()
            for (place, name, _), value in zip(terms, values, strict=True):
                if not math.isfinite(value):
                    raise TrainingError(f"loss {name}={value} at {self.where(place)}, step {step}")
                report.losses.setdefault(place, {})[name] = value
        for place, sizes in self.sizes.items():
            if taken := sizes.take():
                report.sizes[place] = {name: float(value) for name, value in taken.items()}
        if norms:
            report.square_norms = {
                part: value / self.scale() ** 2
                for part, value in self.optimizer.square_norms().items()
            }
            for part, value in report.square_norms.items():
                if not math.isfinite(value) and not self.optimizer.rule.scaled:
                    raise TrainingError(f"gradient of {self.part_at(part, value)}, step {step}")
        return report

    def part_at(self, part: str, value: float) -> str:
        """A part whose gradient is not finite, in words."""
        return f"{part} is {value}"

    def apply(self, step: int, square_norms: Iterable[Mapping[str, float]] | None) -> None:
        """Optimizer step; with clipping `square_norms` are those of all hosts."""
        self.catch_up()
        self.optimizer.step(step, square_norms)

    # -- state --------------------------------------------------------------------------------

    def state(self) -> State:
        """(weights and buffers, optimizer state), keyed by part; a copy tells what only it has."""
        if self.copy.index == 0:
            return self.own_state()
        self.catch_up()
        slots = self.optimizer.state() if self.copy.shards else {}
        return {}, {key: value.clone() for key, value in slots.items()}

    def own_state(self) -> State:
        """Of all parts that live here, whoever else has them too."""
        weights, slots = ({k: t.clone() for k, t in part.items()} for part in self.state_now())
        return weights, slots | self.stands()

    def state_now(self) -> State:
        """Weights and slots, not copied: the next update changes them."""
        self.catch_up()
        weights = {
            f"{name}/{key}": value.detach().cpu()
            for name, module in self.parts.items()
            for key, value in module.state_dict().items()
        }
        return weights, self.optimizer.state()

    def stands(self) -> dict[str, Tensor]:
        """Where the stream stands that is read here, if one is."""
        return self.batches.state() if self.batches else {}

    def shapes(self) -> dict[str, Tensor]:
        """Weights and buffers as tensors without numbers."""
        return {
            f"{name}/{key}": torch.empty_like(value, device="meta")
            for name, module in self.parts.items()
            for key, value in module.state_dict().items()
        }

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Take the own parts out of a full or partial state."""
        for name, module in self.parts.items():
            module.load_state_dict(part_state(weights, name))
        self.optimizer.load(optimizer)
        if self.batches:
            self.batches.load(optimizer)
        self.versions = self._versions()
        self.forget()

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        self.held.clear()
        self.later.clear()
        if self.reduction:
            self.reduction.forget()
        for module in self.parts.values():
            module.zero_grad(set_to_none=True)
        for losses in (*self.losses.values(), *self.sizes.values()):
            losses.take()


def there(held: Held, name: str) -> Tensor:
    """A tensor that must have arrived."""
    value = held[name]
    assert value is not None, name
    return value
