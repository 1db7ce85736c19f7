"""TreeProp-TT on Ray: each depth is an actor that owns its cell, plus one for data and readout.

One step of D = 3; a depth waits for nothing but the coarser states and the readout's answer:

    boundary   open      R2        R1        R0
    depth 2         A2        B2 U2
    depth 1              A1        B1 U1
    depth 0                   A0        B0 U0

A ahead, R readout's answer, B backward, U update (with global clipping all updates wait for all
norms). Tensors: x (the batch), s<d> (states after depth d), e<d> (h_N_hat), g<d> (its slope).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from treeprop_ray.config import Settings, run_name
from treeprop_ray.data import Batches, DataSet
from treeprop_ray.engine import runtime, transport
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.base import Score
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.recovery import RecoveringEngine
from treeprop_ray.optim import OptimizerRule
from treeprop_ray.placement import Cluster, Plan, check_fits, resources
from treeprop_ray.rule import Piece
from treeprop_ray.schedule import Call, Layout, Op
from treeprop_ray.through_time.engine import Owner, optimizer_rule, time_rule
from treeprop_ray.through_time.network import (
    READOUT,
    TimeNetwork,
    cell_name,
    make_part,
)
from treeprop_ray.through_time.time_tree import Depth, Readout, TimeRule, first_states
from treeprop_ray.tree import Tree

if TYPE_CHECKING:
    from treeprop_ray.data import Shape

BOUNDARY = 0  # host 0 has data, labels and readout; host 1 + d the cell of depth d


def one_time_step(D: int, pieces: int) -> list[Call]:
    """The calls of a step in the order of submission, which is each actor's order of work."""

    def call(
        phase: str, d: int, host: int, piece: int, reads: str, writes: str, last: bool
    ) -> Call:
        op = Op(phase, d, tuple(reads.split()), tuple(writes.split()))
        return Call(phase, d, host, piece, (op,), op.reads, tuple((w,) for w in op.writes), last)

    calls = []
    for piece in range(pieces):
        calls.append(call("open", D, BOUNDARY, piece, "", "x", False))
        for d in reversed(range(D)):
            coarser = f" s{d + 1}" if d < D - 1 else ""
            finer = f"s{d} " if d > 0 else ""
            calls.append(call("ahead", d, 1 + d, piece, "x" + coarser, f"{finer}e{d}", False))
            calls.append(call("readout", d, BOUNDARY, piece, f"e{d}", f"g{d}", d == 0))
            calls.append(call("back", d, 1 + d, piece, f"g{d}", "", True))
    return calls


class DepthHost(Owner):
    """The cell of one depth."""

    def __init__(self, d: int, rule: TimeRule, cell: nn.Module, *rest: Any) -> None:
        super().__init__({cell_name(d): cell}, *rest)
        self.depth = Depth(cell, d, rule, self.autocast)  # type: ignore[arg-type]
        self.top = d == rule.depth - 1

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.depth.forget()

    def run(
        self, call: Call, piece: Piece, inputs: dict[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Ahead or back."""
        d = self.depth.d
        if call.phase == "back":
            self.note(d, self.depth.back(self._here(inputs[f"g{d}"]), piece.total))
            return {}
        x = self._here(inputs["x"])
        coarser = (
            first_states(x, self.depth.cell.hidden) if self.top else self._here(inputs[f"s{d + 1}"])
        )
        states, hat = self.depth.ahead(x, coarser)
        return {f"e{d}": hat} if d == 0 else {f"s{d}": states, f"e{d}": hat}

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
        self.readout = Readout(readout, self.autocast)
        self.current: tuple[int, Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Drop everything of a step that was under way."""
        super().forget()
        self.readout.forget()

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
        d = call.nodes[0]
        hat = inputs[f"e{d}"]
        assert hat is not None
        labels = self.readout.onehot(y[piece.start : piece.stop])
        slope = self.readout.answer(d, hat.to(self.device), labels, piece.total)
        if call.last:
            for asked, terms in self.readout.settle(labels, piece.total).items():
                self.note(asked, terms)
        return {f"g{d}": slope}

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
        d = index - 1
        return DepthHost(d, time_rule(s), make_part(s, self.shape, cell_name(d)), *rest)


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
        self.shape, self.optimizer, self.splits = shape, optimizer, splits
        super().__init__(settings, Tree(2**settings.time.depth), owns_ray)

    def _plan(self, settings: Settings, cluster: Cluster) -> Plan:
        return plan_time(settings, cluster)

    def _start(self, made: Plan) -> None:
        s = self.settings
        job = TimeJob(s, self.shape, self.optimizer, made.device)
        calls = one_time_step(s.time.depth, s.microbatches)
        clip = job.optimizer.clips_globally
        roles = [
            Role(
                name=name,
                about="data, readout" if index == BOUNDARY else f"cell of depth {index - 1}",
                make_host=partial(job.host, index),
                calls=tuple(c for c in calls if c.host == index),
                total=s.batch,
                pieces=s.microbatches,
                clip=clip,
                direct=s.transport != "store",
                threads=s.threads,
                keep_spans=4 * s.microbatches * s.timeline_steps,
            )
            for index, name in enumerate(made.names)
        ]
        self.driver = Driver(made, roles, calls, clip, s.in_flight, s.transport, s.wave_timeout)

    def score(self, paths: Mapping[str, Sequence[int]], split: str) -> dict[str, Score]:
        batches = [(split, i) for i in range(self.splits[split])]
        scores: dict[str, Score] = self._guarded(lambda: self._score(paths, batches))
        return scores

    def clean_loss(self, path: Sequence[int], step: int) -> float:
        scores: dict[str, Score] = self._guarded(lambda: self._score({"": path}, [("step", step)]))
        return scores[""].loss

    def _score(
        self, paths: Mapping[str, Sequence[int]], batches: Sequence[tuple[str, int]]
    ) -> dict[str, Score]:
        boundary, *depths = self.driver.actors
        states = [actor.state.remote() for actor in depths]
        found: dict[str, Score] = self.driver.get(
            [boundary.ask.remote("score_here", paths, batches, *states)]
        )[0]
        return found


def plan_time(settings: Settings, cluster: Cluster) -> Plan:
    """One actor per depth and one boundary; raises UserError when they can never fit."""
    run = run_name(settings)
    names = (f"{run}/boundary", *(f"{run}/depth-{d}" for d in range(settings.time.depth)))
    cpus, gpus = resources(settings, len(names), cluster)
    layout = Layout({d: 1 + d for d in range(settings.time.depth)})
    device = "cuda" if gpus > 0 and settings.device != "cpu" else "cpu"
    made = Plan(layout, names, cpus, gpus, settings.strategy, device)
    check_fits(made, cluster)
    return made


def build(settings: Settings, data: DataSet, total_steps: int) -> TimeRayEngine:
    """Start or join Ray and make one actor per depth and one boundary."""
    owns = runtime.start(settings.ray)
    try:
        rule = optimizer_rule(settings, total_steps)
        return TimeRayEngine(settings, data.shape, rule, data.batch_counts, owns)
    except BaseException:
        if owns:
            runtime.stop()
        raise
