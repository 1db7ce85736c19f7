"""The distributed engine: every tree node (or line of nodes, or chain stage, or depth) is a Ray
actor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from torch import Tensor

from treeprop_ray.core.rule import HeldOut
from treeprop_ray.data import Batches
from treeprop_ray.engine import runtime, transport
from treeprop_ray.engine.actors import Role
from treeprop_ray.engine.base import Engine, Saving, Span
from treeprop_ray.engine.driver import Driver
from treeprop_ray.engine.points import Point
from treeprop_ray.engine.recovery import Recovery
from treeprop_ray.engine.stream import driver_class
from treeprop_ray.engine.watch import Watch
from treeprop_ray.errors import UserError, first_line
from treeprop_ray.hosts.base import Host, State, StepReport
from treeprop_ray.methods import Job
from treeprop_ray.methods.auto import decided_for
from treeprop_ray.schedule.copies import Copy, copied
from treeprop_ray.schedule.ops import STEP
from treeprop_ray.schedule.placement import Plan

Answer = TypeVar("Answer")


def fetched(stored: Sequence[Any]) -> Batches:
    """The batches that were put into the object store."""
    recipe: Callable[[], Batches] = ray.get(stored[0])
    return recipe()


Usage = tuple[float, int, list[Span]]  # busy seconds, bytes sent, last spans


def whole_name(name: str) -> str:
    """The name of a pass with all its pieces in one copy."""
    return f"whole {name}"


def unsendable(job: Job, error: Exception) -> UserError:
    """Which part of a network cannot be sent to actors, and why."""
    what, why = "network", error.__cause__ or error
    for name, part in getattr(job.parts, "parts", {}).items():
        try:
            cloudpickle.dumps(part)
        except Exception as e:  # the user's own modules may raise anything
            what, why = f"part {name}", e
            break
    return UserError(
        f"{what}: cannot be sent to an actor: {first_line(why)}; have it made there "
        "(model.name=package.module:factory), or use engine=local"
    )


class RayEngine(Engine):
    """Runs a job on the actors of a plan, and recovers from lost ones."""

    driver: Driver
    spread = True

    def __init__(
        self, job: Job, owns_ray: bool = False, way_on: Callable[[], str] | None = None
    ) -> None:
        super().__init__(job)
        self.owns_ray = owns_ray
        self.avoid: set[str] = set()  # machines that others cannot reach
        self._watch = Watch(way_on) if way_on else None
        self.job = replace(job, batches=self._shipped(job))
        if self._watch:
            self._watch.start()
        try:
            choice = decided_for(job, runtime.cluster(self.avoid))
            print(*choice.why, sep="\n", end="\n" if choice.why else "", flush=True)
            self.settings = choice.settings  # those of the job, with a placement
            self.recovery = Recovery(self, self.settings)
            self.recovery.first(lambda: self.start(self._planned()))
        except BaseException:
            self._unwatch()
            raise

    def _planned(self) -> Plan:
        return self.method.plan(self.settings, self.tree, runtime.cluster(self.avoid))

    def _shipped(self, job: Job) -> Callable[[], Batches]:
        """The batches in the object store: only the actor that opens them fetches them."""
        try:
            return partial(fetched, [ray.put(job.batches)])
        except Exception as e:  # pickle, or the user's own code, may raise anything
            raise UserError(
                f"data: cannot be sent to the boundary actor: {first_line(e)}; have it made there "
                "(data.name=package.module:factory), or use engine=local"
            ) from e

    def start(self, plan: Plan) -> None:
        """Make the actors of a plan."""
        self._check_tasks(plan)
        job, method, settings = self.job, self.method, self.job.settings
        hosts, shards = len(plan.names), settings.shard_optimizer and plan.copies > 1
        keeps = settings.keep_steps and plan.copies > 1
        passes = {STEP: method.calls(job, plan), **method.other_calls(job, plan)}
        if plan.copies > 1:  # the probe runs on the first copy
            whole = {whole_name(name): calls for name, calls in passes.items()}
            passes = {n: copied(c, hosts, plan.copies, settings.pieces) for n, c in passes.items()}
            passes.update(whole if len(whole) > 1 else {})
        calls, others = passes[STEP], {n: c for n, c in passes.items() if n != STEP}
        roles, sent = [], replace(job, metrics={})  # the user's metrics are measured here
        for index, name in enumerate(plan.actors):
            copy = Copy(index // hosts, plan.copies, settings.reduce == "exact", shards)
            mine = tuple(call for call in calls if call.host == index)
            more = tuple(c for passes in others.values() for c in passes if c.host == index)
            counts = [sum(c.host == index for c in passes) for passes in (calls, *others.values())]
            roles.append(
                Role(
                    name=name,
                    about=method.about(settings, plan, job.tree, index % hosts),
                    make_host=partial(
                        method.host, replace(sent, copy=copy), plan.seen_by(index), index % hosts
                    ),
                    calls=mine + more,
                    total=job.places,
                    pieces=settings.pieces,
                    starts=tuple(itertools.accumulate(counts[:-1], initial=0)),
                    threads=settings.threads,
                    keep_spans=(len(mine) + 2 + 3 * (plan.copies > 1)) * settings.timeline_steps,
                    copy=copy.index,
                    copies=copy.of,
                    shards=shards,
                    versions=settings.in_flight + 1 if keeps else 0,
                )
            )
        self.plan = plan
        try:
            self.driver = driver_class(settings.transport)(
                plan,
                roles,
                calls,
                clip=job.optimizer.exchanges,
                in_flight=settings.in_flight,
                wave_timeout=settings.wave_timeout,
                others=others,
                pass_at=job.pass_at,
                shards=shards,
                avoid=self.avoid,
                fast=settings.reduce == "fast" and plan.copies > 1,
                most=settings.snapshot_every,
            )
        except TypeError as e:
            if "serialize" in str(e):  # Ray's text has a page
                raise unsendable(job, e) from e
            raise

    def _check_tasks(self, plan: Plan) -> None:
        """Tasks that read the data would wait for ever beside actors that have all CPUs."""
        cpus = sum(cpus for cpus, _ in runtime.cluster().nodes)
        taken = sum(bundle.get("CPU", 0.0) for bundle in plan.bundles)
        if self.job.runs_tasks and cpus - taken < 1:
            raise UserError(
                f"cpus_per_actor={plan.cpus:g}: {len(plan.actors)} actors take {taken:g} of "
                f"{cpus:g} CPUs; Ray Data needs at least 1 for its tasks, so use less"
            )

    # -- steps --------------------------------------------------------------------------------

    def _step(self, step: int, report: bool) -> None:
        self.recovery.step(step, report)

    def _reports(self) -> list[StepReport]:
        return self.guarded(lambda: self.driver.wait())

    def guarded(self, action: Callable[[], Answer]) -> Answer:
        return self.recovery.guarded(action)

    def mark(self, done: int) -> None:
        self.recovery.mark(done)

    def ask(self, host: int, verb: Callable[..., Any], *words: Any, returns: int = 1) -> Any:
        return self.driver.ask(host, verb, *words, returns=returns)

    def get(self, answers: Sequence[Any]) -> list[Any]:
        return [transport.arriving(answer) for answer in self.driver.get(answers)]

    def submit(self, name: str, at: HeldOut) -> None:
        self.driver.probe(whole_name(name) if self.plan.copies > 1 else name, at)

    # -- state --------------------------------------------------------------------------------

    def state(self) -> State:
        return self.guarded(self._state)

    def _state(self) -> State:
        self.driver.wait()
        weights: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        for of_weights, of_optimizer in self.get(self.driver.states()):
            weights.update(of_weights)
            optimizer.update(of_optimizer)
        return dict(sorted(weights.items())), dict(sorted(optimizer.items()))

    def load(self, state: State, step: int = 0) -> None:
        self.recovery.start_from(Point.of((dict(state[0]), dict(state[1]))), step)

    def ready(self, answers: Sequence[Any]) -> bool:
        refs = list(answers)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return len(done) == len(refs)

    def take_up(self, read: Callable[[Host], None], step: int) -> None:
        self.recovery.start_from(Point(read=read), step)

    def storing(self, saving: Saving | None) -> None:
        self.recovery.saving = saving
        self.driver.hold(saving.step if saving else None)

    def usage(self) -> list[Usage]:
        """Per actor: busy seconds and bytes sent since the last question, and its last spans."""

        def ask() -> list[Any]:
            self.driver.wait()
            return self.driver.get([actor.usage.remote() for actor in self.driver.actors])

        return self.guarded(ask)

    def spans(self) -> list[Span]:
        return [span for _, _, spans in self.usage() for span in spans]

    @property
    def dashboard(self) -> str:
        return runtime.dashboard()

    def hear(self, heard: Callable[[str], None]) -> None:
        self.recovery.heard = heard

    def _unwatch(self) -> None:
        if self._watch:
            self._watch.stop()

    def close(self) -> None:
        try:
            self.driver.close()  # it asks the control store, and would wait a minute for a lost one
        finally:
            self._unwatch()
        if self.owns_ray:
            runtime.stop()
