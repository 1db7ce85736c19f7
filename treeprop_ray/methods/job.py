"""A Job is what an engine runs: a network, its data and its rules.

They are recipes, which each host carries out for its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from treeprop_ray.config import Settings, dotted, recurrent
from treeprop_ray.core.frozen import frozen_parts
from treeprop_ray.core.loss import check_targets
from treeprop_ray.core.network import STEM, Blueprint, Shape, TreeNetwork, edge_name, named
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.scoring import Metric, metrics_of
from treeprop_ray.core.states import Spec
from treeprop_ray.core.tree import Tree
from treeprop_ray.data import Batches, DataSet, load
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.base import Share
from treeprop_ray.methods.base import Method, of
from treeprop_ray.schedule.copies import Copy
from treeprop_ray.schedule.placement import Plan

Parts = Callable[[Sequence[str]], dict[str, nn.Module]]


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
    context: Spec | None = None  # of what the stem gives to all blocks besides z_0
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # the user's own, beside the loss
    copy: Copy = Copy()  # of the hosts that are made

    @property
    def places(self) -> int:
        """Rows of a step's batch."""
        return self.settings.step_samples * self.rule.mc_samples

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        known = self.sizes["train"] // self.settings.step_samples
        return known or self.settings.data.epoch_steps or self.total_steps

    def pass_at(self, step: int) -> str:
        """The pass over the hosts that a step is."""
        return self.method.pass_at(self, step)

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
            self.context,
            self.copy,
        )


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


def rule_for(
    method: Method, settings: Settings, family: str, data: DataSet, context: Spec | None
) -> Rule:
    """The objective's settings; UserError where the loss cannot take the data's labels."""
    rule = method.rule(settings, family, data.labels_per_sample)
    check_targets(rule.loss, data.example.y, data.classes)
    if context is None:
        return rule
    if not method.takes_context:
        raise UserError(f"method={method.name}: takes no stem that gives a context besides z_0")
    return replace(rule, context=context.num_leaves)


def job_of(settings: Settings, data: DataSet, total_steps: int) -> Job:
    """The job of settings; `data` gives shapes and counts, hosts load what they need themselves."""
    method = of(settings)
    if not data.classes and (recurrent(settings) or not dotted(settings.model.name)):
        raise UserError(
            f"data.classes=0: model.name={settings.model.name} must know how many classes "
            f"{data.name} has; say it"
        )
    recipe = method.network(settings, data.shape)
    context, tree = None, Tree(recipe.N, settings.split)
    if isinstance(recipe, Blueprint):
        context, tree = recipe.spec, recipe.tree(settings.split)
        check_ends(method, settings, recipe.tie is not None)
    names = method.all_parts(settings, tree)
    frozen = frozen_parts(settings.freeze, names, tree)
    stem_trains = recipe.stem_trains and edge_name(STEM) not in frozen
    trained = set(names) - frozen - (set() if stem_trains else {edge_name(STEM)})
    if not trained:
        raise UserError(f"freeze={settings.freeze}: leaves nothing to train")
    rule = rule_for(method, settings, recipe.family, data, context)
    metrics = metrics_of(settings.metrics)
    if metrics and not (len(data.validation) or len(data.test)):
        given = ",".join(settings.metrics)
        raise UserError(f"metrics=[{given}]: {data.name} has neither validation nor test samples")
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
        stem_trains=stem_trains,
        frozen=frozen,
        context=context,
        metrics=metrics,
        **facts_of(data),
    )


def check_ends(method: Method, settings: Settings, shared: bool) -> None:
    """Raise UserError where stem and head share weights and would live apart."""
    if shared and method.parts_ends and settings.engine == "ray":
        raise UserError(
            f"method={method.name} engine=ray: the head uses the stem's weights, so the two cannot "
            "be different stages of a chain; use engine=local"
        )


def facts_of(data: DataSet) -> dict[str, Any]:
    """What a job knows of its data."""
    return {
        "shape": data.shape,
        "sizes": data.sizes,
        "splits": data.batch_counts,
        "permutation": data.permutation,
        "resumes": data.resumes,
        "runs_tasks": data.runs_tasks,
    }


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
            from treeprop_ray.core.vision import prepared

            return prepared, (OwnModules, self.parts)
        return OwnModules, (self.parts,)


def job_over(
    network: TreeNetwork,
    settings: Settings,
    data: DataSet,
    total_steps: int,
    metrics: Mapping[str, Metric] | None = None,
) -> Job:
    """The job over the modules of a network and data that is at hand."""
    method = of(settings)
    parts = named(network.parts())
    stem, head = parts[edge_name(STEM)], parts[edge_name(network.tree.head)]
    shared = {id(p) for p in stem.parameters()} & {id(p) for p in head.parameters()}
    check_ends(method, settings, bool(shared))
    names = method.all_parts(settings, network.tree)
    frozen = frozen_parts(settings.freeze, names, network.tree)
    trained = {name for name in set(names) - frozen if trains(parts[name])}
    if not trained:
        raise UserError(f"freeze={settings.freeze}: leaves no parameter that requires a gradient")
    rule = rule_for(method, settings, network.family, data, network.context)
    return Job(
        method=method,
        settings=settings,
        tree=network.tree,
        rule=replace(rule, still=method.still(network.tree, trained)),
        optimizer=method.optimizer(settings, network.tree, total_steps).tried(),
        total_steps=total_steps,
        parts=OwnModules(parts),
        batches=partial(batches_over, settings, total_steps, data),
        stem_trains=edge_name(STEM) in trained,
        frozen=frozen,
        context=network.context,
        metrics=metrics or {},
        **facts_of(data),
    )
