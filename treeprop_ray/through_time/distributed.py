"""TreeProp-TT on Ray: each depth is an actor (or several) with its cell, plus one for the data and
the readout. Who does what when: time_schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treeprop_ray.config import Settings, run_name
from treeprop_ray.core.jumps import jumps, window_of
from treeprop_ray.core.lookahead import Jump, Roll, look_names
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rule import Piece
from treeprop_ray.core.time_tree import Depth, Readout, TimeRule, first_states
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Batches, DataSet
from treeprop_ray.engine import runtime, transport
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.base import Score, State, StepReport
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.recovery import RecoveringEngine
from treeprop_ray.models.rnn import READOUT, TimeNetwork, cell_name, make_part
from treeprop_ray.schedule.ops import Call, Layout
from treeprop_ray.schedule.placement import Cluster, Plan, check_fits, resources
from treeprop_ray.schedule.time import BOUNDARY, Window, one_time_step, windows
from treeprop_ray.through_time.engine import Owner, optimizer_rule, time_rule

if TYPE_CHECKING:
    from treeprop_ray.data import Shape


class DepthHost(Owner):
    """The cell of one depth, or a copy of it for some of the nodes."""

    def __init__(self, window: Window, rule: TimeRule, cell: nn.Module, *rest: Any) -> None:
        super().__init__({cell_name(window.d): cell}, *rest)
        self.window, self.leads, self.cell = window, window.j == 0, cell
        self.depth = Depth(cell, window.d, rule)  # type: ignore[arg-type]
        self.ahead_too: Roll | Jump | None = None  # depth 0 then has no nodes
        if rule.lookahead and window.d == 0:
            self.ahead_too = Roll(self.depth.cell, rule.depth)
        elif rule.lookahead and window.d in jumps(rule.depth, window_of(rule.depth)):
            self.ahead_too = Jump(self.depth.cell, window.d, rule.depth)

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.depth.forget()
        if self.ahead_too:
            self.ahead_too.forget()

    @torch.no_grad()
    def run(
        self, call: Call, piece: Piece, inputs: dict[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Ahead, back, or add up the gradients of all windows."""
        with self.autocast():
            if call.phase == "ahead":
                return self._ahead(call, inputs)
            if call.phase == "back":
                d = self.window.d
                answer = self._here(inputs[f"g{d}"]) if self.window.last else None
                self.note(d, self.depth.back(answer, piece.total))
                return {name: self._gradients() for name in call.outputs}
            if self.ahead_too:
                return self._look(call, inputs)
        grads = [
            self._gradients() if k == self.window.j else self._here(inputs[f"G{self.window.d}.{k}"])
            for k in range(self.window.S)
        ]
        total = torch.stack(grads).sum(0)
        parameters = list(self.cell.parameters())
        for p, g in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view_as(p)
        return {}

    def _ahead(self, call: Call, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        w, x = self.window, self._here(inputs["x"])
        width = 2 ** (w.d + 1)  # symbols that a node reads
        first = w.j * w.nodes - w.halo
        x = x[:, first * width : (w.j + 1) * w.nodes * width]
        beyond = self._here(inputs[w.beyond])[:, 0] if w.beyond else None
        if w.top:
            states = first_states(x, self.depth.cell.hidden)
        else:
            found = [self._here(inputs[f"s{w.d + 1}.{k}"]) for k in w.reads]
            states = found[0] if len(found) == 1 else torch.cat(found, 1)
            start = first - w.reads[0] * found[0].shape[1]
            stop = start + w.halo + w.nodes
            if not w.last and not w.beyond:
                beyond = states[:, stop]
            states = states[:, start:stop].contiguous()
        finer, hat = self.depth.ahead(x, states, w.halo, beyond)
        made = {w.name("s"): finer, w.name("f"): finer[:, :1], f"e{w.d}": hat}
        return {name: made[name] for name in call.outputs}

    def _look(self, call: Call, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The depth's share of the lookahead: there, or back."""
        part = self.ahead_too
        assert part is not None
        found = {name[0]: self._here(t) for name, t in inputs.items()}
        if isinstance(part, Jump):
            there = call.phase == "jump"
            made = part.ahead(found["x"], found["v"]) if there else part.back(found["a"])
            return dict.fromkeys(call.outputs, made)
        if call.phase == "rolled":
            part.back(found["a"])
            return {}
        return dict.fromkeys(call.outputs, part.ahead(found["x"]))

    def _gradients(self) -> Tensor:
        grads = [p.grad for p in self.cell.parameters()]
        return torch.cat([g.flatten() for g in grads if g is not None])

    def report(self, step: int, norms: bool) -> StepReport:
        """Only the first of several windows tells the norms, which are the same for all."""
        return super().report(step, norms and self.leads)

    def state(self) -> State:
        """Only the first of several windows tells the state, which is the same for all."""
        return super().state() if self.leads else ({}, {})

    def _here(self, t: Tensor | None) -> Tensor:
        assert t is not None
        return t.to(self.device)


class BoundaryHost(Owner):
    """Data, labels and readout; scores the network with the cells that the depths send."""

    def __init__(
        self, batches: Batches, network: Callable[[], TimeNetwork], readout: nn.Linear, *rest: Any
    ) -> None:
        super().__init__({READOUT: readout}, *rest)
        self.batch, self.network = batches, network
        self.readout = Readout(readout)
        self.current: tuple[int, Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.readout.forget()

    @torch.no_grad()
    def run(
        self, call: Call, piece: Piece, inputs: dict[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Hand out the batch, or answer a depth."""
        if self.current is None or self.current[0] != piece.step:
            x, y = (t.to(self.device) for t in self.batch(piece.step))
            self.current = (piece.step, x, y)
        _, x, y = self.current
        if call.phase == "open":
            return {"x": x[piece.start : piece.stop]}
        (given,) = inputs.values()
        assert given is not None
        hat, labels = given.to(self.device), self.readout.onehot(y[piece.start : piece.stop])
        names = look_names(len(hat)) if call.phase == "look" else [(call.nodes[0], "ce")]
        hat_nBH = hat.view(len(names), *hat.shape[-2:])
        with self.autocast():
            slope = self.readout.answer(names, hat_nBH, labels, piece.total)
            if call.last:
                for asked, terms in self.readout.settle(labels, piece.total):
                    self.note(asked, terms)
        return dict.fromkeys(call.outputs, slope.view_as(hat))

    def score_here(
        self, paths: Mapping[str, Sequence[int]], batches: Sequence[tuple[str, int]], *states: Any
    ) -> dict[str, Score]:
        """Score with the weights that the depths sent (and the own readout)."""
        weights: dict[str, Any] = {
            k: transport.from_array(v) for state, _ in states for k, v in state.items()
        }
        network = self.network()
        network.load({**weights, **self.state()[0]})
        with self.autocast():
            return network.to(self.device).score(
                paths, (self.batch.evaluation(split, i) for split, i in batches)
            )


@dataclass(frozen=True)
class TimeJob:
    """What an actor needs to build its share."""

    settings: Settings
    shape: Shape
    optimizer: OptimizerRule
    device: str

    def host(self, index: int) -> DepthHost | BoundaryHost:
        """Runs inside the actor."""
        from treeprop_ray.engine.job import batches_from_settings

        s = self.settings
        rest = (self.optimizer, self.device, s.precision)
        if index == BOUNDARY:
            readout = make_part(s, self.shape, READOUT)
            assert isinstance(readout, nn.Linear)
            network = partial(TimeNetwork.of, s, self.shape)
            return BoundaryHost(batches_from_settings(s), network, readout, *rest)
        window = windows_of(s)[index - 1]
        cell = make_part(s, self.shape, cell_name(window.d))
        return DepthHost(window, time_rule(s), cell, *rest)


class TimeRayEngine(RecoveringEngine):
    """Drives the actors of a time tree, and recovers from lost ones."""

    def __init__(
        self,
        settings: Settings,
        shape: Shape,
        optimizer: OptimizerRule,
        splits: Mapping[str, int],
        owns_ray: bool,
    ) -> None:
        self.shape, self.optimizer = shape, optimizer
        super().__init__(settings, Tree(2**settings.time.depth), splits, owns_ray)

    def _plan(self, settings: Settings, cluster: Cluster) -> Plan:
        return plan_time(settings, cluster)

    def _start(self, made: Plan) -> None:
        s = self.settings
        job = TimeJob(s, self.shape, self.optimizer, made.device)
        calls = one_time_step(
            s.time.depth, s.microbatches, s.time.shards, s.time.sweeps, time_rule(s).lookahead
        )
        about = ["data, readout", *(describe(w) for w in windows_of(s))]
        clip = job.optimizer.clips_globally
        roles = [
            Role(
                name=name,
                about=about[index],
                make_host=partial(job.host, index),
                calls=tuple(c for c in calls if c.host == index),
                total=s.batch,
                pieces=s.microbatches,
                direct=s.transport != "store",
                threads=s.threads,
                keep_spans=(4 * s.microbatches + 1) * s.timeline_steps,
            )
            for index, name in enumerate(made.names)
        ]
        self.driver = Driver(made, roles, calls, clip, s.in_flight, s.transport, s.wave_timeout)

    def _score(
        self, paths: Mapping[str, Sequence[int]], batches: Sequence[tuple[str, int]]
    ) -> dict[str, Score]:
        boundary, *depths = self.driver.actors
        states = [actor.state.remote() for actor in depths]
        found: dict[str, Score] = self.driver.get(
            [boundary.ask.remote("score_here", paths, batches, *states)]
        )[0]
        return found


def windows_of(settings: Settings) -> list[Window]:
    """The windows of a run."""
    return windows(settings.time.depth, settings.time.shards, settings.time.sweeps)


def describe(window: Window) -> str:
    """What the dashboard shows of an actor."""
    shard = f", nodes {window.j + 1}/{window.S}" if window.S > 1 else ""
    return f"cell of depth {window.d}{shard}"


def plan_time(settings: Settings, cluster: Cluster) -> Plan:
    """An actor per depth (and shard) and one boundary; UserError when they can never fit."""
    run = run_name(settings)
    cells = [f"depth-{w.d}" + (f"-{w.j}" if w.S > 1 else "") for w in windows_of(settings)]
    names = (f"{run}/boundary", *(f"{run}/{cell}" for cell in cells))
    cpus, gpus = resources(settings, len(names), cluster)
    layout = Layout({i: i for i in range(1, len(names))})
    device = "cuda" if gpus > 0 and settings.device != "cpu" else "cpu"
    made = Plan(layout, names, cpus, gpus, settings.strategy, device)
    check_fits(made, cluster)
    return made


def build(settings: Settings, data: DataSet, total_steps: int) -> TimeRayEngine:
    """Start or join Ray and make the actors."""
    owns = runtime.start(settings.ray)
    try:
        rule = optimizer_rule(settings, total_steps)
        return TimeRayEngine(settings, data.shape, rule, data.batch_counts, owns)
    except BaseException:
        if owns:
            runtime.stop()
        raise
