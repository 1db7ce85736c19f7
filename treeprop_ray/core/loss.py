"""Losses at the head by name, or a function of the user's own; all are means over the whole batch.

A label with `ignore_index` does not count: neither in the sum nor in the number it is divided by.
The number is that of the whole batch (`counted`), so that pieces of a batch add up to its mean.

    cross_entropy  outputs (B, …, classes), labels (B, …); mean over labels, or their class weights
    bce            outputs and targets (B, …, labels), each 0 or 1; mean over the labels
    mse            outputs and targets of one shape; mean over the numbers
    own function   (outputs, targets) -> a loss per sample; mean over samples
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from treeprop_ray.config.names import imported
from treeprop_ray.core.factor import full
from treeprop_ray.core.rule import LossRule
from treeprop_ray.errors import UserError


def total(rule: LossRule, outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed loss of all labels that count."""
    outputs = full(outputs)
    if rule.name == "cross_entropy":
        return _cross_entropy(rule, outputs, targets, "sum")
    return _each(rule, outputs, targets).sum()


def per_sample(rule: LossRule, outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed loss of every sample."""
    outputs = full(outputs)
    if rule.name == "cross_entropy":
        return _cross_entropy(rule, outputs, targets, "none").view(len(targets), -1).sum(1)
    return _each(rule, outputs, targets).view(len(targets), -1).sum(1)


def counted(rule: LossRule, targets: Tensor) -> float:
    """What a sum over these targets is divided by: labels that count, or their class weights."""
    if rule.name == "mse":
        return targets.numel()
    if rule.own:
        return len(targets)
    keep = targets != rule.ignore_index
    if rule.class_weights:
        weights = torch.tensor(rule.class_weights, dtype=torch.float64)
        return float(weights[targets[keep].cpu()].sum())
    return int(keep.sum())


def correct(rule: LossRule, outputs: Tensor, targets: Tensor) -> tuple[int, int]:
    """(correct labels, labels that count); none where a loss knows no right and wrong."""
    if not rule.judges:
        return 0, 0
    keep = targets != rule.ignore_index
    if rule.name == "bce":
        predicted = _like(outputs, targets) > 0
        return int(((predicted == (targets > 0.5)) & keep).sum()), int(keep.sum())
    predicted = outputs.argmax(-1).view_as(targets)
    return int((predicted == targets).logical_and_(keep).sum()), int(keep.sum())


def check_targets(rule: LossRule, targets: Tensor, classes: int) -> None:
    """Raise UserError where a loss cannot take targets like these."""
    if rule.name == "cross_entropy":
        if targets.is_floating_point():
            raise UserError(
                f"loss.name=cross_entropy: labels must be whole numbers, not {targets.dtype}; for "
                "numbers use loss.name=mse, for several labels of 0 and 1 loss.name=bce"
            )
        if rule.class_weights and len(rule.class_weights) != classes:
            raise UserError(
                f"loss.class_weights: {len(rule.class_weights)} numbers for {classes} classes; "
                "one for each"
            )
    elif rule.own:
        imported("loss.name", rule.name)


def _cross_entropy(rule: LossRule, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    weights = rule.class_weights
    if outputs.shape[:-1].numel() != targets.numel():
        raise UserError(
            f"the head gives shape {tuple(outputs.shape)} for labels of shape "
            f"{tuple(targets.shape)}; cross-entropy needs the classes in the last axis, e.g. by "
            "movedim(1, -1)"
        )
    return F.cross_entropy(
        outputs.flatten(0, -2),
        targets.flatten(),
        weight=torch.tensor(weights, dtype=outputs.dtype, device=outputs.device)
        if weights
        else None,
        ignore_index=rule.ignore_index,
        label_smoothing=rule.label_smoothing,
        reduction=reduction,
    )


def _each(rule: LossRule, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every number, label or sample; 0 where it does not count. First axis: samples."""
    if rule.own:
        return _own(rule, outputs, targets)
    outputs = _like(outputs, targets)
    wide = targets.to(outputs.dtype)
    if rule.name == "mse":
        return (outputs - wide) ** 2
    keep = targets != rule.ignore_index
    each = F.binary_cross_entropy_with_logits(outputs, wide * keep, reduction="none")
    return each * keep


def _own(rule: LossRule, outputs: Tensor, targets: Tensor) -> Tensor:
    losses = imported("loss.name", rule.name)(outputs, targets)
    if not isinstance(losses, Tensor) or losses.dim() == 0 or len(losses) != len(targets):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UserError(
            f"loss.name={rule.name}: must give a loss per sample, {len(targets)} of them, "
            f"not {shape}"
        )
    row = losses.shape[1:2]
    if row == losses.shape[:1] and row not in (outputs.shape[1:2], targets.shape[1:2]):
        raise UserError(
            f"loss.name={rule.name}: gives shape {tuple(losses.shape)} of outputs of shape "
            f"{tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: every sample "
            "meets every other; bring the two into one shape"
        )
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def _like(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs in the shape of the targets; one number per sample may have an axis of its own."""
    if outputs.shape != targets.shape and outputs.shape[-1:] == (1,):
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise UserError(
            f"the head gives shape {tuple(outputs.shape)} for targets of shape "
            f"{tuple(targets.shape)}; this loss needs the same"
        )
    return outputs


def plain_head(rule: LossRule, head: object, name: str) -> bool:
    """Whether a head's own `loss_sum` or `count` serves: they are plain cross-entropy."""
    return rule == LossRule() and hasattr(head, name)
