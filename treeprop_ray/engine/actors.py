"""The Ray actor around a host. It runs calls in the order in which the driver submits them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
import torch
from ray.util.metrics import Gauge
from torch import Tensor

from treeprop_ray.core.rule import HeldOut, Piece, cut
from treeprop_ray.engine import transport
from treeprop_ray.engine.base import Span
from treeprop_ray.engine.points import Point
from treeprop_ray.errors import TrainingError, UserError, told_at
from treeprop_ray.hosts.base import Added, HandedOut, Held, Host, StepReport
from treeprop_ray.hosts.reduction import Packet as Weights
from treeprop_ray.schedule.ops import Call

Norms = Mapping[str, float]  # squared gradient norms by part


class HostLike(Protocol):
    """What an actor needs of its host: hosts.base.Host, or an emulated one."""

    at: str

    def begin(self, call: Call) -> None: ...
    def run(self, call: Call, piece: Piece, inputs: dict[str, Tensor | None]) -> Held: ...
    def hand_out(self) -> list[HandedOut]: ...
    def add_up(self, others: Sequence[HandedOut]) -> Added: ...
    def take(self, others: Sequence[Added]) -> None: ...
    def weights_out(self) -> Weights: ...
    def renew(self, others: Sequence[Weights]) -> None: ...
    def report(self, step: int, norms: bool) -> StepReport: ...
    def apply(self, step: int, square_norms: Sequence[Norms] | None) -> None: ...


@dataclass(frozen=True)
class Role:
    """What an actor is told when it is made."""

    name: str
    about: str  # shown by the dashboard
    make_host: Callable[[], HostLike]
    calls: tuple[Call, ...]  # this host's calls of one step, in order; then those of the probe
    total: int  # places in a batch
    pieces: int
    threads: int = 1
    keep_spans: int = 0
    programs: Mapping[str, Any] = field(default_factory=dict)  # transport=stream: by pass
    clip: bool = False  # transport=stream: norms of all hosts are needed
    copy: int = 0  # of several copies which one this is
    copies: int = 1
    shards: bool = False  # each copy updates its share


class HostActor:
    """A host in a process of its own."""

    def __init__(self, role: Role) -> None:
        """An error is kept for `ready`: raised here, it would look like an actor that was lost."""
        self.unmade: TrainingError | UserError | None = None
        self.kept: dict[int, Any] = {}  # states of another actor, by step
        try:
            self.become(role)
        except (TrainingError, UserError) as e:
            self.unmade = e

    def become(self, role: Role) -> None:
        """Take up a role: build the host from scratch."""
        torch.set_num_threads(role.threads)
        self.role = role
        try:
            self.host = role.make_host()
        except UserError as e:
            raise UserError(f"{e} (actor {role.name})") from e
        except Exception as e:
            raise told_at(f"actor {role.name} cannot be made", e) from e
        self.unmade = None
        self.broken: TrainingError | UserError | None = None
        self.told: StepReport | None = None  # the report of the step that is ending
        self.spans: deque[Span] = deque(maxlen=role.keep_spans)
        self.sent = 0
        self.busy = 0.0
        self.calls, self.seconds = 0, 0.0  # of training, since the role was taken up
        self._gauges = _Gauges(role.name)

    def __repr__(self) -> str:
        if not hasattr(self, "role"):  # Ray asks when it could not even unpack the role
            return type(self).__name__
        return f"{self.role.name} {self.role.about}"

    def ready(self) -> str:
        """Answers when the actor has built its part."""
        if self.unmade:
            raise self.unmade
        return repr(self)

    def settled(self) -> None:
        """Answers when all calls before it are done."""
        if self.broken:
            raise self.broken

    def run(self, index: int, at: int | HeldOut, *packets: transport.Packet) -> Any:
        """One call of the schedule; returns a packet for each group of readers."""
        if self.broken:
            raise self.broken  # the first error is the one to show, not what follows from it
        call = self.role.calls[index]
        piece = cut(at, self.role.total, self.role.pieces)[call.piece]
        out = self.work(call, piece, at, transport.unpack(packets))
        packed = transport.pack(out, call.packets)
        return packed if len(packed) > 1 else (packed[0] if packed else None)

    def prepare(self, call: Call, at: int | HeldOut) -> None:
        """What a call begins with and needs no inputs for."""
        begin = time.time()
        try:
            self.host.begin(call)
        except Exception as e:
            self.broken = told_at(f"actor {self.role.name}, step {at}", e)
            raise self.broken from e
        if isinstance(at, int):
            self.busy += time.time() - begin

    def work(
        self, call: Call, piece: Piece, at: int | HeldOut, inputs: dict[str, Tensor | None]
    ) -> Held:
        """A call of the host; its error says where it arose, its time is written down."""
        begin = time.time()
        try:
            out = self.host.run(call, piece, inputs)
        except Exception as e:
            nodes = f"node {', '.join(map(str, call.nodes))}" if call.nodes else "boundary"
            where = self.host.at or f"{nodes}, level {call.level}"
            self.broken = told_at(f"{where}, step {at}", e)
            raise self.broken from e
        if isinstance(at, int):  # the timeline is about training
            seconds = self._note(call.phase, call.level, call.piece, at, begin)
            self.sent += transport.size(out)
            self.calls, self.seconds = self.calls + 1, self.seconds + seconds
            self._gauges.wave(call, seconds, self.sent)
        return out

    def hand_out(self, step: int, _: object) -> Any:
        """For each copy of this host what it needs to add up its share of the gradients. `_` is
        the call it waits for."""
        return [self._sent(part) for part in self._shared("hand_out", step, self.host.hand_out)]

    def add_up(self, step: int, *others: Any) -> Any:
        """The sums of the own share of the gradients, over all copies."""
        given = [transport.arriving(other) for other in others]
        return self._sent(self._shared("add_up", step, self.host.add_up, given))

    def _sent(self, value: Any) -> Any:
        """A value on its way to another copy, in travelling form; its bytes are counted."""
        leaving = transport.leaving(value)
        self.sent += transport.weight(leaving)
        return leaving

    def _shared(self, phase: str, step: int, verb: Callable[..., Any], *words: Any) -> Any:
        """Work on gradients of several copies."""
        if self.broken:
            raise self.broken
        begin = time.time()
        try:
            out = verb(*words)
        except Exception as e:
            self.broken = told_at(f"actor {self.role.name}, end of step {step}", e)
            raise self.broken from e
        self._note(phase, 0, 0, step, begin)
        return out

    def report(self, step: int, norms: bool, *sums: Any) -> StepReport:
        """Losses and gradient norms after the backward waves; with copies, `sums` are those of the
        others."""
        self.told = None
        if self.broken:
            raise self.broken
        begin = time.time()
        try:
            if sums:
                self.host.take([transport.arriving(other) for other in sums])
            self.told = report = self.host.report(step, norms)
        except Exception as e:
            raise told_at(f"actor {self.role.name}, end of step {step}", e) from e
        self._note("report", 0, 0, step, begin)
        self._gauges.losses(report)
        return report

    def apply(self, step: int, _: object, *others: StepReport) -> Any:
        """Optimizer step with the gradient norms of all hosts: the own ones are here, those of the
        others arrive. `_` is the call it waits for. With shards, the weights that it updates."""
        if self.told:  # else the report has failed, and says why
            return self._apply(step, [r.square_norms for r in (self.told, *others)])
        return None

    def finish(self, step: int, norms: bool, _: object, *sums: Any) -> Any:
        """Report and optimizer step in one call, when no global norm is needed; with shards also
        the weights that it updates."""
        report = self.report(step, norms, *sums)
        weights = self._apply(step, None)
        return (report, weights) if self.role.shards else report

    def renew(self, step: int, *others: Any) -> None:
        """With shards: the weights that other copies have updated."""
        given = [transport.arriving(other) for other in others]
        self._shared("renew", step, self.host.renew, given)

    def _apply(self, step: int, square_norms: Sequence[Norms] | None) -> Any:
        begin = time.time()
        try:
            self.host.apply(step, square_norms)
            weights = self._sent(self.host.weights_out()) if self.role.shards else None
        except Exception as e:
            raise told_at(f"actor {self.role.name}, update of step {step}", e) from e
        self._note("update", 0, 0, step, begin)
        return weights

    def _note(self, phase: str, level: int, piece: int, step: int, begin: float) -> float:
        """Write down work that ends now; returns its seconds."""
        end = time.time()
        self.busy += end - begin
        self.spans.append(Span(self.role.name, phase, level, piece, step, begin, end))
        return end - begin

    def usage(self) -> tuple[float, int, list[Span]]:
        """(busy seconds, bytes sent) since the last question, and the last spans."""
        busy, sent = self.busy, self.sent
        self.busy, self.sent = 0.0, 0
        return busy, sent, list(self.spans)

    def pace(self) -> float:
        """Mean seconds of a call so far."""
        return self.seconds / max(1, self.calls)

    # -- evaluation and state -------------------------------------------------------------------

    def ask(self, verb: Callable[..., Any], *words: Any) -> Any:
        """Have the host do one of its methods that is no part of the schedule."""
        try:
            return transport.leaving(verb(self.host, *map(transport.arriving, words)))
        except Exception as e:
            raise told_at(f"actor {self.role.name}, {verb.__name__}", e) from e

    def machine(self) -> str:
        """Ray's name of the machine this is on."""
        return str(ray.get_runtime_context().get_node_id())

    def state(self, own: bool = False) -> tuple[tuple[str, ...], Any]:
        """The names of parts that are told about here; their weights and optimizer state. `own`:
        also of parts that another copy tells about."""
        assert isinstance(self.host, Host)
        state = self.host.own_state() if own else self.host.state()
        parts = {key.partition("/")[0] for part in state for key in part}
        return tuple(parts), transport.leaving(state)

    def keep(self, step: int, state: Any) -> None:
        """Hold the state of another actor, of the time before `step`, in memory: the newest two."""
        self.kept = {**dict(sorted(self.kept.items())[-1:]), step: state}

    def load(self, point: Point, index: int) -> None:
        """Take up what belongs here of a point's states, which are fetched only then."""
        assert isinstance(self.host, Host)
        self.broken = None
        self.host.load(*point.state_of(self.host.parts, index))

    def take_up(self, read: Callable[[Host], None]) -> None:
        """Have the host read its parts of a stored state."""
        assert isinstance(self.host, Host)
        self.broken = None
        self._shared("load", 0, read, self.host)


class _Gauges:
    """Metrics of one actor for the dashboard and Prometheus."""

    def __init__(self, name: str) -> None:
        run, _, actor = name.rpartition("/")
        tags = {"run": run, "actor": actor}
        self.seconds = Gauge(
            "treeprop_wave_seconds", "seconds of a level wave", ("run", "actor", "level", "phase")
        )
        self.seconds.set_default_tags(tags)
        self.loss = Gauge(
            "treeprop_node_loss", "sum of a node's loss terms", ("run", "actor", "node")
        )
        self.loss.set_default_tags(tags)
        self.bytes = Gauge("treeprop_bytes_sent", "bytes sent to other actors", ("run", "actor"))
        self.bytes.set_default_tags(tags)
        self._due: dict[object, float] = {}

    def _is_due(self, key: object) -> bool:
        """A gauge is read every few seconds: no need to spend time on it in every call."""
        now = time.monotonic()
        if now < self._due.get(key, 0.0):
            return False
        self._due[key] = now + 0.5
        return True

    def wave(self, call: Call, seconds: float, sent: int) -> None:
        if self._is_due((call.level, call.phase)):
            self.seconds.set(seconds, {"level": str(call.level), "phase": call.phase})
            self.bytes.set(sent)

    def losses(self, report: StepReport) -> None:
        if self._is_due("losses"):
            for n, terms in report.losses.items():
                self.loss.set(sum(terms.values()), {"node": str(n)})
