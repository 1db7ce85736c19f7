"""Optimizers and schedules of a user's own, for tests."""

from __future__ import annotations

from typing import Any

import torch

Groups = list[dict[str, Any]]


def nadam(groups: Groups, lr: float) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups, lr=lr)


def adafactor(groups: Groups, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=lr)


class Counting(torch.optim.SGD):
    """Keeps a number for every parameter, and steps by it."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                with torch.no_grad():
                    p.add_(p.grad, alpha=-group["lr"] / count)


def counting(groups: Groups, lr: float) -> torch.optim.Optimizer:
    return Counting(groups, lr=lr)


class Grouped(torch.optim.SGD):
    """Keeps a number for all parameters together."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def grouped(groups: Groups, lr: float) -> torch.optim.Optimizer:
    return Grouped(groups, lr=lr)


def nothing(groups: Groups, lr: float) -> None:
    return None


def flat(groups: Groups, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for group in groups for p in group["params"]], lr=lr)


def closed(groups: Groups, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(groups, lr=lr)


def halves(step: int, total_steps: int) -> float:
    return 1.0 if step < total_steps / 2 else 0.5


def negative(step: int, total_steps: int) -> float:
    return -1.0
