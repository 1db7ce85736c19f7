"""Optimizers and schedules of the user's own (`package.module:factory`), and what they must do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from treeprop_ray.config.names import imported
from treeprop_ray.errors import UserError, first_line


def own_optimizer(kind: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """What the user's factory makes of parameter groups and a learning rate."""
    factory = imported("optimizer", kind)
    try:
        optimizer = factory(groups, lr)
    except Exception as e:  # the user's code may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"optimizer={kind}: factory(groups, lr) failed: {reason}") from e
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer={kind}: gives {type(optimizer).__name__}, must give a torch.optim.Optimizer"
        )
    if any("factor" not in group for group in optimizer.param_groups):
        raise UserError(
            f"optimizer={kind}: is not over the groups that the factory is given; pass them on as "
            "they are: Optimizer(groups, lr=lr)"
        )
    return optimizer


def own_factor(schedule: str, step: int, total_steps: int) -> float:
    """The factor on the learning rate that the user's function gives for a step."""
    function = imported("schedule", schedule)
    try:
        factor = float(function(step, total_steps))
    except Exception as e:  # the user's code may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"schedule={schedule}: function(step, total_steps) failed: {reason}") from e
    if not (math.isfinite(factor) and factor >= 0):
        raise UserError(f"schedule={schedule}: gives {factor} at step {step}; must be at least 0")
    return factor


def try_optimizer(kind: str, lr: float, weight_decay: float) -> None:
    """Raise UserError where it cannot be made or cannot do a step."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    group = {"params": [parameter], "factor": 1.0, "weight_decay": weight_decay}
    optimizer = own_optimizer(kind, [group], lr)
    try:
        optimizer.step()
    except Exception as e:  # the user's code may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"optimizer={kind}: step() failed: {reason}") from e
