"""Recurrent networks: a host for one depth, for data and readout, for a whole time tree, for BPTT.

Who does what when: schedule/time.py. What a depth computes: core/time_tree.py, core/lookahead.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from treeprop_ray.core.bptt import BPTT, fused, scanned, unrolled
from treeprop_ray.core.cells import GRUCell
from treeprop_ray.core.jumps import jumps, window_of
from treeprop_ray.core.lookahead import Jump, Roll, look_names
from treeprop_ray.core.mingru import MinGRUCell
from treeprop_ray.core.newton import Newton
from treeprop_ray.core.rule import Piece
from treeprop_ray.core.scoring import Score
from treeprop_ray.core.time_tree import Depth, Readout, Terms, TimeRule, first_states
from treeprop_ray.data.batches import Which
from treeprop_ray.hosts.base import Held, Host, Share, State, StepReport, there
from treeprop_ray.models.rnn import READOUT, TimeNetwork, cell_name
from treeprop_ray.schedule.ops import Call, Op
from treeprop_ray.schedule.time import Window

Weights = dict[str, Tensor]


class TimeHost(Host):
    """Places are depths; nothing here needs a graph."""

    @torch.no_grad()
    def run(self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Do a call."""
        with self.autocast():
            return super().run(call, piece, inputs)

    def where(self, place: int) -> str:
        """The depth."""
        return f"depth {place}"

    def note_terms(self, depth: int, terms: Terms) -> None:
        """Add a piece's loss terms to those of the step."""
        for name, value in terms.items():
            self.note(depth, name, value)

    def weights(self) -> Weights:
        """The weights of the parts that live here, for a score elsewhere."""
        return self.state()[0]

    def score_here(
        self,
        network: Callable[[], TimeNetwork],
        paths: Mapping[str, Sequence[int]],
        batches: Sequence[Which],
        *others: Weights,
    ) -> dict[str, Score]:
        """Score paths with the own weights and those that other hosts have sent."""
        assert self.batches is not None
        whole = network().to(self.device)
        whole.load({key: t for part in (*others, self.weights()) for key, t in part.items()})
        with self.autocast():
            return whole.score(paths, map(self.batches.get, batches))


def depth_of(cell: nn.Module, d: int, rule: TimeRule) -> Depth | Newton:
    """The work of a depth; recipe=newton has something else at depth 0."""
    if rule.newton and d == 0:
        return Newton(cell, rule)  # type: ignore[arg-type]
    return Depth(cell, d, rule)  # type: ignore[arg-type]


class DepthHost(TimeHost):
    """The cell of one depth, or a copy of it for some of the nodes."""

    def __init__(self, share: Share, window: Window, rule: TimeRule) -> None:
        super().__init__(share)
        self.window, self.speaks = window, window.j == 0
        self.cell = self.parts[cell_name(window.d)]
        self.depth = depth_of(self.cell, window.d, rule)
        self.roll: Roll | None = None  # recipe=lookahead: depth 0 has it in place of nodes
        self.jump: Jump | None = None
        if rule.lookahead and window.d == 0:
            self.roll = Roll(self.depth.cell, rule.depth)
        elif rule.lookahead and window.d in jumps(rule.depth, window_of(rule.depth)):
            self.jump = Jump(self.depth.cell, window.d, rule.depth)
        self.verbs = {
            "ahead": self._ahead, "back": self._back, "add": self._add, "roll": self._roll,
            "rolled": self._rolled, "jump": self._jump, "return": self._return,
        }  # fmt: skip

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        for part in (self.depth, self.roll, self.jump):
            if part:
                part.forget()

    def _ahead(self, op: Op, held: Held, piece: Piece) -> None:
        w, x = self.window, there(held, "x")
        width = 2 ** (w.d + 1)  # symbols that a node reads
        first = w.j * w.nodes - w.halo
        x = x[:, first * width : (w.j + 1) * w.nodes * width]
        beyond = there(held, w.beyond)[:, 0] if w.beyond else None
        if w.top:
            states = first_states(x, self.depth.cell.hidden)
        else:
            coarser = [there(held, f"s{w.d + 1}.{k}") for k in w.reads]
            states = coarser[0] if len(coarser) == 1 else torch.cat(coarser, 1)
            start = first - w.reads[0] * coarser[0].shape[1]
            stop = start + w.halo + w.nodes
            if not w.last and not w.beyond:
                beyond = states[:, stop]
            states = states[:, start:stop].contiguous()
        finer, hat = self.depth.ahead(x, states, w.halo, beyond)
        held.update({w.name("s"): finer, w.name("f"): finer[:, :1], f"e{w.d}": hat})

    def _back(self, op: Op, held: Held, piece: Piece) -> None:
        answer = there(held, op.reads[0]) if self.window.last else None
        self.note_terms(self.window.d, self.depth.back(answer, piece.total))
        held.update({name: self._gradients() for name in op.writes})

    def _add(self, op: Op, held: Held, piece: Piece) -> None:
        """Add up the gradients of all windows, in one order everywhere."""
        w = self.window
        grads = [self._gradients() if k == w.j else there(held, f"G{w.d}.{k}") for k in range(w.S)]
        total = torch.stack(grads).sum(0)
        parameters = [p for p in self.cell.parameters() if p.requires_grad]
        for p, g in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view_as(p)

    def _gradients(self) -> Tensor:
        grads = [p.grad for p in self.cell.parameters()]
        return torch.cat([g.flatten() for g in grads if g is not None])

    def _roll(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.roll is not None
        held[op.writes[0]] = self.roll.ahead(there(held, "x"))

    def _rolled(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.roll is not None
        self.roll.back(there(held, op.reads[0]))

    def _jump(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.jump is not None
        held[op.writes[0]] = self.jump.ahead(there(held, "x"), there(held, op.reads[1]))

    def _return(self, op: Op, held: Held, piece: Piece) -> None:
        assert self.jump is not None
        held[op.writes[0]] = self.jump.back(there(held, op.reads[0]))

    def report(self, step: int, norms: bool) -> StepReport:
        """Only the first of several windows tells the norms, which are the same for all."""
        return super().report(step, norms and self.speaks)

    def state(self) -> State:
        """Only the first of several windows tells the state, which is the same for all."""
        return super().state() if self.speaks else ({}, {})


class ReadoutHost(TimeHost):
    """Data, labels and readout."""

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        module = self.parts[READOUT]
        assert isinstance(module, nn.Linear)
        self.readout = Readout(module)
        self.verbs = {"open": self._open, "readout": self._answer, "look": self._look}

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.readout.forget()

    def _open(self, op: Op, held: Held, piece: Piece) -> None:
        held["x"], held["y"] = self.places(piece)

    def _answer(self, op: Op, held: Held, piece: Piece) -> None:
        hat = there(held, op.reads[0])
        labels = self.readout.onehot(there(held, "y"))
        slope = self.readout.answer([(op.n, "ce")], hat.unsqueeze(0), labels, piece.total)
        held[op.writes[0]] = slope.view_as(hat)

    def _look(self, op: Op, held: Held, piece: Piece) -> None:
        ends = there(held, op.reads[0])
        labels = self.readout.onehot(there(held, "y"))
        held[op.writes[0]] = self.readout.answer(look_names(len(ends)), ends, labels, piece.total)

    def end_piece(self, piece: Piece) -> None:
        """All have asked: the readout's own gradient, and the cross-entropies by depth."""
        _, y = self.places(piece)
        for depth, terms in self.readout.settle(self.readout.onehot(y), piece.total):
            self.note_terms(depth, terms)


class WholeTreeHost(TimeHost):
    """A whole time tree: all depths ahead, one question to the readout, all depths back."""

    def __init__(self, share: Share, rule: TimeRule) -> None:
        super().__init__(share)
        cells = self.parts
        self.depths = [
            depth_of(cells[cell_name(d)], d, rule)
            for d in reversed(range(int(rule.lookahead), rule.depth))
        ]
        self.names = [(depth.d, "ce") for depth in self.depths]
        readout = cells[READOUT]
        assert isinstance(readout, nn.Linear)
        self.readout = Readout(readout)
        self.roll: Roll | None = None
        self.jumps: list[Jump] = []
        if rule.lookahead:
            self.roll = Roll(cells[cell_name(0)], rule.depth)  # type: ignore[arg-type]
            self.jumps = [
                Jump(cells[cell_name(d)], d, rule.depth)  # type: ignore[arg-type]
                for d in jumps(rule.depth, self.roll.W)
            ]
        self.verbs = {"whole": self._whole}

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        for part in (*self.depths, *self.jumps, self.roll, self.readout):
            if part:
                part.forget()

    def _whole(self, op: Op, held: Held, piece: Piece) -> None:
        x_BNS, y = self.places(piece)
        labels, total = self.readout.onehot(y), piece.total
        states, hats = first_states(x_BNS, self.readout.module.in_features), []
        for depth in self.depths:
            states, hat = depth.ahead(x_BNS, states)
            hats.append(hat)
        if hats:  # not with the lookahead at D = 1
            answers = self.readout.answer(self.names, torch.stack(hats), labels, total)
            for depth, answer in zip(self.depths, answers.unbind(), strict=True):
                self.note_terms(depth.d, depth.back(answer, total))
        if self.roll:
            ends = self.roll.ahead(x_BNS)
            for jump in self.jumps:
                ends = jump.ahead(x_BNS, ends)
            slope = self.readout.answer(look_names(len(ends)), ends, labels, total)
            for jump in reversed(self.jumps):
                slope = jump.back(slope)
            self.roll.back(slope)
        for d, terms in self.readout.settle(labels, total):
            self.note_terms(d, terms)


class BpttHost(TimeHost):
    """Backpropagation through time of the deployed network."""

    def __init__(self, share: Share, torch_gru: bool) -> None:
        super().__init__(share)
        cell, readout = self.parts[cell_name(0)], self.parts[READOUT]
        if torch_gru:
            assert isinstance(cell, GRUCell)
            roll = fused(cell)
        elif isinstance(cell, MinGRUCell):
            roll = scanned(cell)
        else:
            roll = unrolled(cell)  # type: ignore[arg-type]
        self.bptt = BPTT(roll, readout, self.autocast)
        self.verbs = {"whole": self._whole}

    def run(self, call: Call, piece: Piece, inputs: Mapping[str, Tensor | None]) -> Held:
        """Do a call; this one has a graph, and its own idea of autocast."""
        return Host.run(self, call, piece, inputs)

    def _whole(self, op: Op, held: Held, piece: Piece) -> None:
        x_BNS, y = self.places(piece)
        self.note(0, "ce", self.bptt.gradients(x_BNS, y, piece.total))
