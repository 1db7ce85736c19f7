"""Scores of paths: sums over the labels of every batch. A head may bring its own `count`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treeprop_ray.config.names import imported
from treeprop_ray.core import loss
from treeprop_ray.core.network import STEM
from treeprop_ray.core.objective import PLAIN
from treeprop_ray.core.rule import LossRule
from treeprop_ray.core.states import split_stem
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError, first_line, told_at


class Counts(NamedTuple):
    """Sums over the labels of a batch that count."""

    loss: float
    weight: float  # what the loss is divided by: labels, or their class weights
    correct: int
    labels: int  # 0 where a loss knows no right and wrong


Through = Callable[..., Any]  # (edge, z, context): runs a block, the stem or the head


@dataclass(frozen=True)
class Score:
    """A path on a split: mean loss and share of correct labels (NaN: no such thing)."""

    loss: float
    accuracy: float
    own: Mapping[str, float] = field(default_factory=dict)  # metrics of the user's own

    @classmethod
    def of(cls, counts: Iterable[Counts], own: Mapping[str, float] | None = None) -> Score:
        """From the counts of some batches, added up in their order."""
        loss, weight, correct, labels = 0.0, 0.0, 0, 0
        for batch in counts:
            loss, weight = loss + batch.loss, weight + batch.weight
            correct, labels = correct + batch.correct, labels + batch.labels
        mean = loss / weight if weight else math.nan
        return cls(mean, correct / labels if labels else math.nan, own or {})


Metric = Any  # (outputs, targets) -> a number, or an object of torchmetrics
SCORED = {"loss", "accuracy", "perplexity", "val_loss"}


def metrics_of(values: Sequence[str]) -> dict[str, Metric]:
    """The metrics that `metrics=[package.module:name]` names, each by the last part of its name.

    What can be called without words (a class, a function without arguments) makes the metric.
    """
    metrics: dict[str, Metric] = {}
    for value in values:
        name = value.rpartition(":")[2].rpartition(".")[2]
        check_name(name)
        if name in metrics:
            raise UserError(f"metrics={value}: another one has the name {name}")
        metrics[name] = _metric(value, imported("metrics", value))
    return metrics


def check_name(name: str) -> None:
    """Raise UserError where a metric has the name of what is scored anyway."""
    if name in SCORED:
        raise UserError(f"metrics={name}: is scored anyway; give yours another name")


def _metric(value: str, found: Any) -> Metric:
    """What a name stands for, made where it is a factory."""
    if _updates(found) and not isinstance(found, type):
        return found
    if not (isinstance(found, type) or _takes(found, 0)):
        if not _takes(found, 2):
            raise UserError(f"metrics={value}: must take (outputs, targets), or nothing")
        return found
    try:
        made = found()
    except Exception as e:  # the user's own code may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"metrics={value}: factory() failed: {reason}") from e
    if not (_updates(made) or callable(made)):
        raise UserError(
            f"metrics={value}: gives {type(made).__name__}, must give a function of (outputs, "
            "targets) or an object of torchmetrics"
        )
    return made


def _updates(metric: Any) -> bool:
    """Whether it sees batch after batch, as those of torchmetrics."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _takes(function: Any, count: int) -> bool:
    """Whether it can be called with so many words; nobody knows: with two."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # one of C has no signature
        return count == 2
    return True


def measure(
    metrics: Mapping[str, Metric], batches: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Metrics of the user's own over all (outputs, targets) of a split: functions of all at once,
    or torchmetrics' objects, which see batch after batch."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            if _updates(metric):
                metric.reset()
                for outputs, targets in batches:
                    metric.update(outputs, targets)
                values[name] = float(metric.compute())
            else:
                outputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
                values[name] = float(metric(outputs, targets))
        except Exception as e:  # the user's own code may raise anything
            raise told_at(f"metrics={name}", e) from e
    return values


@torch.no_grad()
def count(head: nn.Module, z: Tensor, y: Tensor, rule: LossRule = PLAIN) -> Counts:
    """Summed loss and correct labels at the head.

    A head may bring its own `count(state, labels)` (in chunks over a large vocabulary): summed
    cross-entropy, correct labels, labels; those of -100 do not count.
    """
    if loss.plain_head(rule, head, "count"):
        total, correct, labels = head.count(z, y.to(z.device))  # type: ignore[operator]
        return Counts(total, labels, correct, labels)
    outputs = head(z)
    y = y.to(outputs.device)
    total = float(loss.total(rule, outputs, y))
    return Counts(total, loss.counted(rule, y), *loss.correct(rule, outputs, y))


def path_states(
    tree: Tree, paths: Mapping[str, Sequence[int]], x: Tensor, through: Through
) -> dict[str, Tensor]:
    """The state in front of the head on every path; beginnings that paths share run once."""
    z_0, context = split_stem(through(STEM, x))
    states: dict[tuple[Edge, ...], Tensor] = {(): z_0}
    out = {}
    for name, path in paths.items():
        along = tree.path_edges(path)[:-1]
        for k in range(1, len(along) + 1):
            key = tuple(along[:k])
            if key not in states:
                states[key] = through(along[k - 1], states[key[:-1]], context)
        out[name] = states[tuple(along)]
    return out
