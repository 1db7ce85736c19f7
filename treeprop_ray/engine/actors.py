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
from treeprop_ray.engine.collective import Together, meeting_at
from treeprop_ray.engine.direct import Rendezvous, gpu_of
from treeprop_ray.engine.points import Point
from treeprop_ray.engine.versions import Reach, Versions
from treeprop_ray.errors import ActorLost, TrainingError, UserError, first_line, told_at
from treeprop_ray.hosts.base import Held, Host, StepReport
from treeprop_ray.hosts.copied import Added, HandedOut
from treeprop_ray.hosts.reduction import Packet as Weights
from treeprop_ray.schedule.ops import Call

Norms = Mapping[str, float]  # squared gradient norms by part


class HostLike(Protocol):
    """What an actor needs of its host: hosts.base.Host, or an emulated one."""

    @property
    def at(self) -> str: ...
    @property
    def weight(self) -> int: ...
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
    starts: tuple[int, ...] = (0,)  # which calls are the first of a pass
    programs: Mapping[str, Any] = field(default_factory=dict)  # transport=stream: by pass
    clip: bool = False  # transport=stream: norms of all hosts are needed
    copy: int = 0  # of several copies which one this is
    copies: int = 1
    shards: bool = False  # each copy updates its share
    versions: int = 0  # states before so many of its last steps are kept


class HostActor:
    """A host in a process of its own."""

    done: int  # the step that comes next
    versions: Versions

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
        self._at(0)
        self.ran = -1  # the last call
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

    def gpu(self) -> str:
        """Which GPU this has; empty for a CPU."""
        return gpu_of(self.device)

    @property
    def device(self) -> torch.device:
        """Where its host's tensors are."""
        return self.host.device if isinstance(self.host, Host) else torch.device("cpu")

    def meet(self, place: Rendezvous, session: str, backend: str, patience: float) -> None:
        """reduce=fast: join the other copies of this host."""
        assert isinstance(self.host, Host)
        if isinstance(self.host.group, Together):
            self.host.group.close()
        store = meeting_at(place, session, patience)
        words = (backend, self.role.copy, self.role.copies, store, patience)
        self.host.group = Together(*words)

    def settled(self) -> None:
        """Answers when all calls before it are done."""
        if self.broken:
            raise self.broken

    def run(self, index: int, at: int | HeldOut, *packets: transport.Packet) -> Any:
        """One call of the schedule; returns a packet for each group of readers."""
        if self.broken:
            raise self.broken  # the first error is the one to show, not what follows from it
        if index not in self.role.starts and index != self.ran + 1:
            # Ray leaves out a call whose inputs are lost; what follows would work on half a step
            self.broken = ActorLost(f"actor {self.role.name}: a call of step {at} never came")
            raise self.broken
        self.ran = index
        call = self.role.calls[index]
        piece = cut(at, self.role.total, self.role.pieces)[call.piece]
        out, begin, end = self.work(call, piece, at, transport.unpack(packets))
        self.account(call, at, out, begin, end)
        packed = transport.pack(out, call.packets)
        return packed if len(packed) > 1 else (packed[0] if packed else None)

    def run_last(self, index: int, at: int | HeldOut, *packets: transport.Packet) -> Any:
        """With copies: the host's last call of a step, and what it hands out after it."""
        self.run(index, at, *packets)
        return self.hand_out(at) if isinstance(at, int) else [None] * self.role.copies

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
    ) -> tuple[Held, float, float]:
        """A call of the host, and when it began and ended; its error says where it arose."""
        begin = time.time()
        try:
            out = self.host.run(call, piece, inputs)
        except Exception as e:
            nodes = f"node {', '.join(map(str, call.nodes))}" if call.nodes else "boundary"
            where = self.host.at or f"{nodes}, level {call.level}"
            self.broken = told_at(f"{where}, step {at}", e)
            raise self.broken from e
        return out, begin, time.time()

    def account(self, call: Call, at: int | HeldOut, out: Held, begin: float, end: float) -> None:
        """Write down a call of training, when others have what they wait for."""
        if isinstance(at, int):
            self._note(call.phase, call.level, call.piece, at, begin, end)
            self.sent += transport.size(out)
            self.calls, self.seconds = self.calls + 1, self.seconds + end - begin
            self._gauges.wave(call, end - begin, self.sent)

    def hand_out(self, step: int, *_: object) -> Any:
        """For each copy of this host what it needs to add up its share of the gradients. `_` is
        what the call before it gives."""
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
        others arrive. `_` is the call it waits for. With shards, the weights that it updates, and
        their slots."""
        told, self.told = self.told, None  # of no later step, whose report may never run
        if told:  # else the report has failed, and says why
            return self._apply(step, [r.square_norms for r in (told, *others)])
        return (None, None) if self.role.shards else None

    def finish(self, step: int, norms: bool, _: object, *sums: Any) -> Any:
        """Report and optimizer step in one call, when no global norm is needed; with shards also
        the weights that it updates, and their slots."""
        report = self.report(step, norms, *sums)
        updated = self._apply(step, None)
        return (report, *updated) if self.role.shards else report

    def renew(self, step: int, slots: Any, *others: Any) -> None:
        """With shards: the weights that other copies have updated, and the slots of the one before
        this, which are kept for it."""
        given = [transport.arriving(other) for other in others]
        self._shared("renew", step, self.host.renew, given)
        if slots is not None:
            self.versions.foster(step, transport.arriving(slots))
        self.done = step + 1

    def _apply(self, step: int, square_norms: Sequence[Norms] | None) -> Any:
        begin = time.time()
        try:
            if self.role.versions and isinstance(self.host, Host):
                self.versions.keep(step, self.host.state_now())
            self.host.apply(step, square_norms)
            if self.role.versions and isinstance(self.host, Host):
                self.versions.ended(step, self.host.stands())
            updated = self._updated() if self.role.shards else None
        except Exception as e:
            raise told_at(f"actor {self.role.name}, update of step {step}", e) from e
        self._note("update", 0, 0, step, begin)
        if not self.role.shards:
            self.done = step + 1
        return updated

    def _updated(self) -> tuple[Any, Any]:
        """With shards: what other copies need of an update, and what one of them keeps."""
        weights = self._sent(self.host.weights_out())
        if self.role.versions and isinstance(self.host, Host):
            return weights, self._sent(self.host.slots_out())
        return weights, None

    def _note(
        self, phase: str, level: int, piece: int, step: int, begin: float, end: float | None = None
    ) -> None:
        """Write down work, which ends now unless it is said when."""
        end = end or time.time()
        self.busy += end - begin
        self.spans.append(Span(self.role.name, phase, level, piece, step, begin, end))

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

    def state(self, own: bool, step: int | None) -> tuple[tuple[str, ...], Any]:
        """The names of parts that are told about here; their weights and optimizer state, before
        `step`. `own`: also of parts that another copy tells about."""
        assert isinstance(self.host, Host)
        if step is not None and step != self.done:  # steps before it have failed somewhere
            raise ActorLost(f"actor {self.role.name} is at step {self.done}, not {step}")
        state = self.host.own_state() if own else self.host.state()
        parts = {key.partition("/")[0] for part in state for key in part}
        return tuple(parts), transport.leaving(state)

    def reach(self) -> Reach:
        """How far this is and can go back; one that was made anew has nothing to tell yet."""
        now = (self.done,) if self.done else ()
        return Reach(self.done, (*self.versions.states, *now), tuple(self.versions.fostered))

    def recall(self, step: int) -> tuple[tuple[str, ...], Any]:
        """Like `state`, of all that is here, as it was before a step that it can reach."""
        assert isinstance(self.host, Host)
        try:
            state = self.versions.before(step, self.host.state_now)
        except Exception as e:  # what was left of a step that nobody can end
            raise ActorLost(f"actor {self.role.name}: {first_line(e)}") from e
        parts = {key.partition("/")[0] for part in state for key in part}
        return tuple(parts), transport.leaving(state)

    def hold(self, step: int | None) -> None:
        """Of the states before earlier steps keep that one, whatever comes."""
        self.versions.held = step

    def keep(self, step: int, state: Any, since: int) -> None:
        """Hold the state of another actor, of the time before `step`, in memory, with those `since`
        the step to which all would go back now."""
        self.kept = {s: kept for s, kept in self.kept.items() if since <= s < step} | {step: state}

    def load(self, point: Point, index: int, step: int) -> None:
        """Take up what belongs here of a point's states, which are fetched only then."""
        assert isinstance(self.host, Host)
        self.broken, self.done = None, 0  # half of a state is none
        self.host.load(*point.state_of(self.host.parts, index))
        self._at(step)

    def take_up(self, read: Callable[[Host], None], step: int) -> None:
        """Have the host read its parts of a stored state."""
        assert isinstance(self.host, Host)
        self.broken, self.done = None, 0
        self._shared("load", 0, read, self.host)
        self._at(step)

    def _at(self, step: int) -> None:
        """The host has the state of the time before `step`, which comes next."""
        stands = self.host.stands() if isinstance(self.host, Host) else {}
        self.done, self.versions = step, Versions(self.role.versions, step, stands)


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
