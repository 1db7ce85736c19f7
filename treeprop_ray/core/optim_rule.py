"""Which optimizer a run has, and the learning rate of every step as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from treeprop_ray.config.names import dotted
from treeprop_ray.core.own_optim import own_factor, own_optimizer, try_optimizer

if TYPE_CHECKING:
    from treeprop_ray.config import Settings


@dataclass(frozen=True)
class OptimizerRule:
    """Which optimizer, and the learning rate of every step of a run of `total_steps`."""

    kind: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    schedule: str = "constant"
    warmup: float = 0.0
    clip: float = 0.0
    total_steps: int = 1
    factors: tuple[tuple[str, float], ...] = ()  # parts with another learning rate: (name, factor)
    factors_end: int | None = None  # the first step from which all parts have one learning rate
    clip_each: bool = False  # clip the norm of each part on its own
    second: tuple[int, float] | None = None  # a second stage: its first step, its learning rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay_norms: bool = True  # weight decay on parameters with fewer than two dimensions too
    ends: tuple[str, ...] = ()  # muon: parts at the ends of the network, which have adamw
    scaled: bool = False  # fp16: gradients are those of a scaled loss

    @classmethod
    def of(cls, settings: Settings, total_steps: int) -> OptimizerRule:
        """The part of the settings that is about the optimizer."""
        s = settings
        return cls(
            s.optimizer, s.lr, s.weight_decay, s.momentum, s.schedule, s.warmup, s.clip,
            total_steps, betas=(s.betas[0], s.betas[1]), eps=s.eps, decay_norms=s.decay_norms,
            scaled=s.precision == "fp16",
        )  # fmt: skip

    def lr_at(self, step: int) -> float:
        """Linear warm-up over the first `warmup` share, then constant, linear or cosine to 0; or
        what the user's own function gives."""
        if self.second:
            first, lr = self.second
            if step >= first:
                rest = replace(self, lr=lr, total_steps=self.total_steps - first, second=None)
                return rest.lr_at(step - first)
            return replace(self, total_steps=first, second=None).lr_at(step)
        if dotted(self.schedule):
            return self.lr * own_factor(self.schedule, step, self.total_steps)
        rising = round(self.warmup * self.total_steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        if self.schedule == "constant":
            return self.lr
        done = (step - rising) / max(1, self.total_steps - rising)
        if self.schedule == "linear":
            return self.lr * (1 - done)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))

    def factor_at(self, step: int, factor: float) -> float:
        """A part's factor on the learning rate, as long as factors count."""
        return factor if self.factors_end is None or step < self.factors_end else 1.0

    @property
    def clips_globally(self) -> bool:
        """Whether the norm of all gradients together is clipped."""
        return self.clip > 0 and not self.clip_each

    @property
    def exchanges(self) -> bool:
        """Whether a step needs the gradient norms of all hosts: all leave out the same steps."""
        return self.clips_globally or self.scaled

    def kind_of(self, part: str, parameter: nn.Parameter) -> str:
        """The optimizer of a parameter: muon is for the matrices of blocks."""
        if self.kind == "muon" and (parameter.ndim != 2 or part in self.ends):
            return "adamw"
        return self.kind

    def decay_of(self, parameter: nn.Parameter) -> float:
        """The weight decay of a parameter."""
        return self.weight_decay if self.decay_norms or parameter.ndim >= 2 else 0.0

    def make(self, kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The torch optimizer over parameter groups, each with its weight decay."""
        if dotted(kind):
            return own_optimizer(kind, groups, self.lr)
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)
        if kind == "muon":  # steps of the size that AdamW's have, so that one lr serves both
            return torch.optim.Muon(
                groups, lr=self.lr, momentum=self.momentum, adjust_lr_fn="match_rms_adamw"
            )
        cls = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
        return cls(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)

    def tried(self) -> OptimizerRule:
        """The rule, if what it imports works; else UserError."""
        if dotted(self.kind):
            try_optimizer(self.kind, self.lr, self.weight_decay)
        for step in (0, self.total_steps - 1):
            self.lr_at(step)
        return self
