"""Optimizer of the parts a host owns: state keyed by edge, learning rate a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
    clip_each: bool = False  # clip the norm of each part on its own
    second: tuple[int, float] | None = None  # a second stage: its first step, its learning rate

    @classmethod
    def of(cls, settings: Settings, total_steps: int) -> OptimizerRule:
        """The part of the settings that is about the optimizer."""
        s = settings
        return cls(
            s.optimizer, s.lr, s.weight_decay, s.momentum, s.schedule, s.warmup, s.clip, total_steps
        )

    def lr_at(self, step: int) -> float:
        """Linear warm-up over the first `warmup` share, then constant, linear or cosine to 0."""
        if self.second:
            first, lr = self.second
            if step >= first:
                rest = replace(self, lr=lr, total_steps=self.total_steps - first, second=None)
                return rest.lr_at(step - first)
            return replace(self, total_steps=first, second=None).lr_at(step)
        rising = round(self.warmup * self.total_steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        if self.schedule == "constant":
            return self.lr
        done = (step - rising) / max(1, self.total_steps - rising)
        if self.schedule == "linear":
            return self.lr * (1 - done)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))

    @property
    def clips_globally(self) -> bool:
        """Whether a step needs the gradient norms of all hosts."""
        return self.clip > 0 and not self.clip_each

    def make(self, params: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """The torch optimizer over parameter groups."""
        if self.kind == "sgd":
            return torch.optim.SGD(
                params, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
            )
        cls = torch.optim.AdamW if self.kind == "adamw" else torch.optim.Adam
        return cls(params, lr=self.lr, weight_decay=self.weight_decay, fused=True)


class PartOptimizer:
    """Torch optimizers over several parts, whose state is read and written part by part.

    The part `first`, if it is here, has an optimizer of its own, so that its update can go ahead.
    """

    def __init__(
        self, parts: Mapping[str, nn.Module], rule: OptimizerRule, first: str = ""
    ) -> None:
        self.rule = rule
        self.params = own_parameters(parts, first)
        ahead = [name for name in self.params if name == first]
        rest = [name for name in self.params if name != first]
        self.optimizers = [(made, o) for made in (ahead, rest) if (o := self._make(made))]

    def _make(self, parts: Sequence[str]) -> torch.optim.Optimizer | None:
        groups: dict[float, list[nn.Parameter]] = {}
        for name in parts:
            factor = dict(self.rule.factors).get(name, 1.0)
            groups.setdefault(factor, []).extend(self.params[name].values())
        made = [{"params": params, "factor": f} for f, params in groups.items() if params]
        return self.rule.make(made) if made else None

    def square_norms(self, parts: Iterable[str] | None = None) -> dict[str, float]:
        """Sum of squared gradients of every part, or of some."""
        found = [
            (name, p.grad)
            for name in (self.params if parts is None else parts)
            for p in self.params[name].values()
            if p.grad is not None
        ]
        out: dict[str, float] = {}
        if found:
            norms = torch.stack(torch._foreach_norm([grad for _, grad in found]))
            for (name, _), norm in zip(found, norms.tolist(), strict=True):
                out[name] = out.get(name, 0.0) + norm * norm
        return out

    def step(self, step: int, square_norms: Iterable[Mapping[str, float]] | None) -> None:
        """One update; with clipping `square_norms` holds those of all hosts."""
        for update in self.turns(step, square_norms):
            update()

    def turns(
        self, step: int, square_norms: Iterable[Mapping[str, float]] | None
    ) -> list[Callable[[], None]]:
        """The update of the part that goes first, and that of the others."""
        norm = None
        if self.rule.clips_globally:
            assert square_norms is not None
            norm = global_norm(square_norms)
        return [partial(self._update, step, norm, *made) for made in self.optimizers]

    def _update(
        self, step: int, norm: float | None, parts: Sequence[str], optimizer: torch.optim.Optimizer
    ) -> None:
        if norm is not None:
            self._clip(parts, norm)
        elif self.rule.clip > 0:
            squares = self.square_norms(parts)
            for name in squares:
                self._clip([name], math.sqrt(squares[name]))
        for group in optimizer.param_groups:
            group["lr"] = self.rule.lr_at(step) * group["factor"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _clip(self, parts: Iterable[str], norm: float) -> None:
        """Shrink the gradients of some parts, whose norm is given, to the norm `clip`."""
        if norm > self.rule.clip:
            grads = [
                p.grad for name in parts for p in self.params[name].values() if p.grad is not None
            ]
            torch._foreach_mul_(grads, self.rule.clip / norm)

    def state(self) -> dict[str, Tensor]:
        """Optimizer state as `edge/parameter/slot` tensors."""
        return {
            f"{edge}/{name}/{slot}": value.detach().cpu()
            for parts, optimizer in self.optimizers
            for edge in parts
            for name, p in self.params[edge].items()
            for slot, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the slots of the own parts out of `state`; parts without slots start anew."""
        slots: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, value in state.items():
            edge, name, slot = key.split("/")
            slots.setdefault((edge, name), {})[slot] = value
        for parts, optimizer in self.optimizers:
            optimizer.state.clear()
            for edge in parts:
                for name, p in self.params[edge].items():
                    # `step` is a scalar that fused optimizers want on the parameter's device
                    if mine := slots.get((edge, name)):
                        optimizer.state[p] = {k: v.clone().to(p.device) for k, v in mine.items()}


def own_parameters(
    parts: Mapping[str, nn.Module], first: str = ""
) -> dict[str, dict[str, nn.Parameter]]:
    """What each part trains; a tensor that several parts use belongs to one, `first` or by name."""
    taken: set[int] = set()
    own: dict[str, dict[str, nn.Parameter]] = {}
    for name in sorted(parts, key=lambda name: (name != first, name)):
        mine = {k: p for k, p in parts[name].named_parameters() if p.requires_grad}
        own[name] = {k: p for k, p in mine.items() if id(p) not in taken}
        taken |= {id(p) for p in mine.values()}
    return dict(sorted(own.items()))


def global_norm(square_norms: Iterable[Mapping[str, float]]) -> float:
    """Norm over all parts; added up in the order of their names, wherever they live."""
    merged = {k: v for norms in square_norms for k, v in norms.items()}
    return math.sqrt(sum(merged[k] for k in sorted(merged)))
