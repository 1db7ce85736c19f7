"""A Method is an object: everything that depends on how a network is trained is asked of it.

A new method is a file with a subclass of `Method` (or of one that is close to it), its schedule and
its host; `register` makes it known. Nobody else reads `settings.method`.

What an engine runs is a Job (methods/job.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from treeprop_ray.config import Settings, dotted, recurrent
from treeprop_ray.core.network import Shape, TreeNetwork, edge_name
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.scoring import Score
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Which
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Host, StepReport
from treeprop_ray.methods.outline import Outline
from treeprop_ray.models.rnn import TimeNetwork
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.schedule.cost import Cost
from treeprop_ray.schedule.ops import STEP, Call
from treeprop_ray.schedule.placement import Plan, alone

if TYPE_CHECKING:
    from treeprop_ray.methods.job import Job

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


class Method(ABC):
    """A way to train a network."""

    name: str  # the value of the setting `method`
    over_time = False  # whether it is for recurrent networks
    short_paths = False  # whether paths besides the chain are trained
    probed = False  # whether the probe can measure it
    parts_ends = False  # whether stem and head may live in different actors
    replicates = False  # whether engine=train can copy it to several workers
    adds_up = True  # whether gradients of a batch are sums over its samples
    takes_context = False  # whether blocks may need more than their state
    copies_heads = False  # whether other actors can have copies of the head
    recomputes = False  # whether a block's activations can be computed again
    finishes = False  # whether its hosts can also backpropagate the chain
    planned = False  # whether placement=auto weighs its blocks (methods/auto.py)

    def serves(self, settings: Settings) -> bool:
        """Whether these settings mean this method."""
        return settings.method == self.name and recurrent(settings) == self.over_time

    def misfit(self, model: str) -> str:
        """What to say where the method does not serve a model."""
        if dotted(model):
            return f"needs model.recurrent={str(self.over_time).lower()} with model.name={model}"
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
        if settings.replicas > 1:
            self._check_copies(settings)
        if settings.head_copies and not (self.copies_heads and settings.engine == "ray"):
            raise UserError(
                f"head_copies={settings.head_copies}: is for method=tree over blocks with "
                f"engine=ray, not method={settings.method} engine={settings.engine}"
            )
        beside = {
            "compile": False, "replicas": 1, "ce_at": "mean", "coarsen": [], "finish_sweeps": 0,
        }  # fmt: skip
        for key, value in beside.items():
            if settings.head_copies and getattr(settings, key) != value:
                only = str(value).lower() if isinstance(value, bool) else value
                raise UserError(f"head_copies={settings.head_copies}: needs {key}={only}")
        if settings.recompute and not self.recomputes:
            raise UserError(
                "recompute=true: is for method=tree and bp over blocks, not "
                f"method={settings.method} model.name={settings.model.name}"
            )
        if settings.coarsen and not self.finishes:
            raise UserError(
                f"coarsen={settings.coarsen}: is for method=tree over blocks, not "
                f"method={settings.method} model.name={settings.model.name}"
            )
        if settings.finish_sweeps and not self.finishes:
            raise UserError(
                f"finish_sweeps={settings.finish_sweeps}: is for method=tree over blocks, not "
                f"method={settings.method} model.name={settings.model.name}"
            )
        if settings.finish_from != "chain" and not self.finishes:
            raise UserError(
                f"finish_from={settings.finish_from}: is for method=tree over blocks, not "
                f"method={settings.method} model.name={settings.model.name}"
            )
        if (settings.finish or settings.finish_path != "full") and not self.finishes:
            raise UserError(
                f"finish={settings.finish} finish_path={settings.finish_path}: is for method=tree "
                f"over blocks, not method={settings.method} model.name={settings.model.name}"
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

    def _check_copies(self, settings: Settings) -> None:
        """Copies share a batch, so its gradients must be sums."""
        given = f"replicas={settings.replicas}"
        if not self.adds_up:
            raise UserError(
                f"{given}: method={settings.method} compares all samples of a batch with each "
                "other; use replicas=1"
            )
        for key in ("coarsen", "finish_sweeps"):
            if value := getattr(settings, key):
                raise UserError(
                    f"{given}: {key}={value} adds up gradients in another order; use one of the two"
                )
        if settings.engine == "train":
            raise UserError(f"{given}: engine=train has `hosts` workers; use replicas=1")

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

    def other_calls(self, job: Job, plan: Plan) -> dict[str, list[Call]]:
        """The calls of other passes over the same hosts: the probe's, or other kinds of steps."""
        return {}

    def pass_at(self, job: Job, step: int) -> str:
        """The pass that a training step is: its own calls, or others."""
        return STEP

    @abstractmethod
    def host(self, job: Job, plan: Plan, index: int) -> Host:
        """A host of the plan with its parts; runs where the host lives."""

    @abstractmethod
    def residents(self, settings: Settings, plan: Plan, tree: Tree) -> list[Resident]:
        """What lives where."""

    def cost(self, settings: Settings, tree: Tree) -> Cost | None:
        """What the mean step of a run costs; None where nobody has counted."""
        return None

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

    def stages(self, job: Job) -> dict[str, dict[str, int]] | None:
        """Steps and block applications per step of each stage, where a run has several."""
        outline = self.outline(job.settings, job.tree)
        return outline.stages(job.total_steps, job.optimizer.second)

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
