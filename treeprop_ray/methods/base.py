"""A Method is an object: everything that depends on how a network is trained is asked of it.

A new method is a file with a subclass of `Method` (or of one that is close to it), its schedule and
its host; `register` makes it known. Nobody else reads `settings.method`.

A Job is what an engine runs: a network, its data and its rules, as recipes that each host carries
out for its share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from treeprop_ray.config import Settings, dotted, recurrent
from treeprop_ray.core.frozen import frozen_parts
from treeprop_ray.core.network import STEM, Shape, TreeNetwork, edge_name, named
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.scoring import Score
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Batches, DataSet, Which, load
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Host, Share, StepReport
from treeprop_ray.methods.outline import Outline
from treeprop_ray.models.rnn import TimeNetwork
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import Cluster, Plan, alone

Parts = Callable[[Sequence[str]], dict[str, nn.Module]]
Answer = TypeVar("Answer")


class Recipe(Protocol):
    """How to make each part of a network; core.network.Blueprint is one."""

    @property
    def N(self) -> int: ...
    @property
    def family(self) -> str: ...
    @property
    def stem_trains(self) -> bool: ...
    def parts(self, names: Sequence[str], seed: int, dtype: torch.dtype) -> dict[str, nn.Module]:
        """Freshly initialised parts; each depends on (seed, name) only."""

    def count_parameters(self, name: str) -> int:
        """Numbers in a part."""


class Crew(Protocol):
    """The hosts of an engine, here or in actors, as a method's own procedures see them."""

    @property
    def job(self) -> Job: ...
    @property
    def plan(self) -> Plan: ...
    def ask(self, host: int, verb: Callable[..., Any], *words: Any, returns: int = 1) -> Any:
        """Have a host do one of its methods; the answer may be a future that other words take."""

    def get(self, answers: Sequence[Any]) -> list[Any]:
        """The values of answers."""

    def guarded(self, action: Callable[[], Answer]) -> Answer:
        """Do something that asks hosts; if some are lost, after their recovery once more."""

    def mark(self, done: int) -> None:
        """The state after `done` steps is one that no replay goes back behind."""


@dataclass(frozen=True)
class Resident:
    """Parts that live together in a host, for people: a node of the tree, a stage, a depth."""

    node: str
    level: str
    host: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """A network, its data and its rules, as recipes that a host carries out for its share."""

    method: Method
    settings: Settings
    tree: Tree
    rule: Rule
    optimizer: OptimizerRule
    total_steps: int
    parts: Parts
    batches: Callable[[], Batches]  # only the host that opens batches calls this
    shape: Shape
    stem_trains: bool
    sizes: Mapping[str, int]  # samples of each split
    splits: Mapping[str, int]  # evaluation batches of each split
    permutation: Tensor | None = None  # the order in which sequences read their numbers
    resumes: bool = True  # whether a stored run goes on with the samples that come next
    runs_tasks: bool = False  # whether reading the samples takes Ray tasks, and CPUs for them
    frozen: frozenset[str] = frozenset()  # parts that do not train

    @property
    def places(self) -> int:
        """Rows of a step's batch."""
        return self.settings.step_samples * self.rule.mc_samples

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        known = self.sizes["train"] // self.settings.step_samples
        return known or self.settings.data.epoch_steps or self.total_steps

    def share(self, names: Sequence[str], plan: Plan, opens: bool) -> Share:
        """What a host of the plan is given."""
        parts = self.parts(names)
        for name in self.frozen & parts.keys():
            parts[name].requires_grad_(False)
        return Share(
            parts,
            self.optimizer,
            self.batches() if opens else None,
            plan.device,
            self.settings.precision,
            self.settings.compile_backend if self.settings.compile else "",
        )


class Method(ABC):
    """A way to train a network."""

    name: str  # the value of the setting `method`
    over_time = False  # whether it is for recurrent networks
    short_paths = False  # whether paths besides the chain are trained
    probed = False  # whether the probe can measure it
    replicates = False  # whether engine=train can copy it to several workers
    recomputes = False  # whether a block's activations can be computed again

    def serves(self, settings: Settings) -> bool:
        """Whether these settings mean this method."""
        return settings.method == self.name and recurrent(settings) == self.over_time

    def misfit(self, model: str) -> str:
        """What to say where the method does not serve a model."""
        needs = "gru or elman" if self.over_time else "mlp, vit or gpt"
        return f"needs model.name={needs}, not {model}"

    def check(self, settings: Settings) -> None:
        """Raise UserError where the settings do not suit the method."""
        if settings.probe.every and not self.probed:
            raise UserError(
                f"probe.every={settings.probe.every}: compares TreeProp over blocks with "
                f"backpropagation; method={settings.method} model.name={settings.model.name} "
                "needs 0"
            )
        if settings.engine == "train" and not self.replicates:
            raise UserError(
                f"engine=train: is for method=bp, not {settings.method}; use engine=ray"
            )
        if settings.recompute and not self.recomputes:
            raise UserError(
                "recompute=true: is for method=tree and bp over blocks, not "
                f"method={settings.method} model.name={settings.model.name}"
            )
        if settings.precision == "fp16" and self.over_time:
            raise UserError(
                f"precision=fp16: is for networks of blocks, not model.name={settings.model.name}; "
                "use bf16"
            )
        if settings.compile and self.over_time:
            raise UserError(
                f"compile=true: is for networks of blocks, not model.name={settings.model.name}"
            )
        if settings.freeze and self.over_time:
            raise UserError(
                f"freeze={settings.freeze}: is for networks of blocks, not "
                f"model.name={settings.model.name}"
            )

    # -- the network ----------------------------------------------------------------------------

    @abstractmethod
    def network(self, settings: Settings, shape: Shape) -> Recipe:
        """How to make the parts of the network."""

    @abstractmethod
    def tree(self, settings: Settings) -> Tree:
        """The tree over the network's blocks (or symbols)."""

    @abstractmethod
    def assemble(
        self, settings: Settings, shape: Shape, weights: Mapping[str, Tensor]
    ) -> TreeNetwork | TimeNetwork:
        """The network in one module, with the weights of a run."""

    def rule(self, settings: Settings, family: str, labels_per_sample: int) -> Rule:
        """The objective's settings, as nodes see them."""
        rule = Rule.of(settings, family, labels_per_sample)
        return replace(rule, mc_samples=1)

    def optimizer(self, settings: Settings, tree: Tree, total_steps: int) -> OptimizerRule:
        """The optimizer of every part."""
        ends = ("stem", edge_name(tree.head), "readout") if settings.optimizer == "muon" else ()
        return replace(OptimizerRule.of(settings, total_steps), ends=ends)

    def still(self, tree: Tree, trained: Collection[str]) -> frozenset[int]:
        """States that depend on none of the trained parts."""
        return frozenset()

    def all_parts(self, settings: Settings, tree: Tree) -> list[str]:
        """All parts that the method trains."""
        residents = self.residents(settings, alone(tree, "cpu"), tree)
        return list(dict.fromkeys(name for resident in residents for name in resident.parts))

    # -- where and when -------------------------------------------------------------------------

    @abstractmethod
    def plan(self, settings: Settings, tree: Tree, cluster: Cluster) -> Plan:
        """Which actors there are; UserError when the cluster can never hold them."""

    def pinned(self, settings: Settings, plan: Plan) -> Settings:
        """Settings whose own plan on the same cluster is this one."""
        return replace(settings, cpus_per_actor=plan.cpus, gpus_per_actor=plan.gpus)

    @abstractmethod
    def calls(self, job: Job, plan: Plan) -> list[Call]:
        """The calls of a step, in the order of submission."""

    def probe_calls(self, job: Job, plan: Plan) -> dict[str, list[Call]]:
        """The calls of the probe's passes."""
        return {}

    @abstractmethod
    def host(self, job: Job, plan: Plan, index: int) -> Host:
        """A host of the plan with its parts; runs where the host lives."""

    @abstractmethod
    def residents(self, settings: Settings, plan: Plan, tree: Tree) -> list[Resident]:
        """What lives where."""

    def about(self, settings: Settings, plan: Plan, tree: Tree, index: int) -> str:
        """What a host is, in a line."""
        nodes = [r.node for r in self.residents(settings, plan, tree) if r.host == index]
        return ", ".join(nodes)

    # -- a run ----------------------------------------------------------------------------------

    @abstractmethod
    def outline(self, settings: Settings, tree: Tree) -> Outline:
        """What a run logs, scores and shows."""

    @abstractmethod
    def score(
        self, crew: Crew, paths: Mapping[str, Sequence[int]], batches: Sequence[Which]
    ) -> dict[str, Score]:
        """Score paths on some batches, on the hosts."""

    def after_step(self, crew: Crew, step: int) -> list[StepReport]:
        """What the method does besides its calls once a step is submitted."""
        return []


METHODS: list[Method] = []


def register(method: Method) -> Method:
    """Make a method known."""
    METHODS.append(method)
    return method


def of(settings: Settings) -> Method:
    """The method that the settings name."""
    for method in METHODS:
        if method.serves(settings):
            return method
    for method in METHODS:
        if method.name == settings.method:
            raise UserError(f"method={settings.method}: {method.misfit(settings.model.name)}")
    names = dict.fromkeys(method.name for method in METHODS)
    raise UserError(f"method={settings.method}: one of {', '.join(names)}")


def checked(settings: Settings) -> Settings:
    """The settings, if they suit their method; else UserError."""
    of(settings).check(settings)
    return settings


def fresh_parts(
    method: Method, settings: Settings, shape: Shape, names: Sequence[str]
) -> dict[str, nn.Module]:
    """Parts of the network that the settings name."""
    return method.network(settings, shape).parts(names, settings.seed, shape.dtype)


def batches_over(settings: Settings, total_steps: int, data: DataSet) -> Batches:
    """The batches of data that is at hand."""
    keep = settings.snapshot_every + settings.in_flight if settings.engine == "ray" else 0
    return Batches(data, settings.step_samples, settings.seed, total_steps, keep)


def batches_of(settings: Settings, total_steps: int) -> Batches:
    """Load the data where it is opened."""
    return batches_over(settings, total_steps, load(settings))


def job_of(settings: Settings, data: DataSet, total_steps: int) -> Job:
    """The job of settings; `data` gives shapes and counts, hosts load what they need themselves."""
    method = of(settings)
    if not data.classes and not dotted(settings.model.name):
        raise UserError(
            f"data.classes=0: model.name={settings.model.name} must know how many classes "
            f"{data.name} has; say it"
        )
    recipe = method.network(settings, data.shape)
    tree = Tree(recipe.N, settings.split)
    names = method.all_parts(settings, tree)
    frozen = frozen_parts(settings.freeze, names, tree)
    stem_trains = recipe.stem_trains and edge_name(STEM) not in frozen
    trained = set(names) - frozen - (set() if stem_trains else {edge_name(STEM)})
    if not trained:
        raise UserError(f"freeze={settings.freeze}: leaves nothing to train")
    rule = method.rule(settings, recipe.family, data.labels_per_sample)
    return Job(
        method=method,
        settings=settings,
        tree=tree,
        rule=replace(rule, still=method.still(tree, trained)) if frozen else rule,
        optimizer=method.optimizer(settings, tree, total_steps).tried(),
        total_steps=total_steps,
        parts=partial(fresh_parts, method, settings, data.shape),
        batches=(
            partial(batches_of, settings, total_steps)
            if settings.engine == "ray"
            else partial(batches_over, settings, total_steps, data)
        ),
        shape=data.shape,
        stem_trains=stem_trains,
        sizes=data.sizes,
        splits=data.batch_counts,
        permutation=data.permutation,
        resumes=data.resumes,
        runs_tasks=data.runs_tasks,
        frozen=frozen,
    )


def trains(module: nn.Module) -> bool:
    """Whether any of its parameters does."""
    return any(p.requires_grad for p in module.parameters())


class OwnModules:
    """The modules of a network that is at hand, as a recipe."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self.parts = parts

    def __call__(self, names: Sequence[str]) -> dict[str, nn.Module]:
        return {name: self.parts[name] for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        """Where modules of transformers arrive, torchvision must be importable before them."""
        homes = {type(m).__module__ for part in self.parts.values() for m in part.modules()}
        if any(home.startswith("transformers") for home in homes):
            from treeprop_ray.data.vision import prepared

            return prepared, (OwnModules, self.parts)
        return OwnModules, (self.parts,)


def job_over(network: TreeNetwork, settings: Settings, data: DataSet, total_steps: int) -> Job:
    """The job over the modules of a network and data that is at hand."""
    method = of(settings)
    parts = named(network.parts())
    names = method.all_parts(settings, network.tree)
    frozen = frozen_parts(settings.freeze, names, network.tree)
    trained = {name for name in set(names) - frozen if trains(parts[name])}
    if not trained:
        raise UserError(f"freeze={settings.freeze}: leaves no parameter that requires a gradient")
    rule = method.rule(settings, network.family, data.labels_per_sample)
    return Job(
        method=method,
        settings=settings,
        tree=network.tree,
        rule=replace(rule, still=method.still(network.tree, trained)),
        optimizer=method.optimizer(settings, network.tree, total_steps).tried(),
        total_steps=total_steps,
        parts=OwnModules(parts),
        batches=partial(batches_over, settings, total_steps, data),
        shape=data.shape,
        stem_trains=edge_name(STEM) in trained,
        sizes=data.sizes,
        splits=data.batch_counts,
        permutation=data.permutation,
        resumes=data.resumes,
        runs_tasks=data.runs_tasks,
        frozen=frozen,
    )
