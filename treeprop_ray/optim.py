"""Optimizer of the parts a host owns: state keyed by edge, learning rate a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
        s = settings
        made = cls(
            s.optimizer, s.lr, s.weight_decay, s.momentum, s.schedule, s.warmup, s.clip, total_steps
        )
        if s.method == "tree" and s.chain_lr != 1:
            chain = range(s.model.blocks - s.model.output_block)  # an output block is in the head
            made = replace(made, factors=tuple((f"{l}-{l + 1}", s.chain_lr) for l in chain))
        if s.method != "cff":
            return made
        first = total_steps - max(1, round(s.cff.head_share * total_steps))
        return replace(made, lr=s.cff.lr, clip_each=True, second=(first, s.cff.head_lr))

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
    """One torch optimizer over several parts, whose state is read and written part by part."""

    def __init__(self, parts: Mapping[str, nn.Module], rule: OptimizerRule) -> None:
        self.rule = rule
        self.params: dict[str, dict[str, nn.Parameter]] = {
            name: {k: p for k, p in module.named_parameters() if p.requires_grad}
            for name, module in sorted(parts.items())
        }
        groups: dict[float, list[nn.Parameter]] = {}
        for name, named in self.params.items():
            groups.setdefault(dict(rule.factors).get(name, 1.0), []).extend(named.values())
        made = [{"params": params, "factor": f} for f, params in groups.items() if params]
        self.optimizer = rule.make(made) if made else None

    def square_norms(self) -> dict[str, float]:
        """Sum of squared gradients of every part."""
        found = [
            (name, p.grad)
            for name, named in self.params.items()
            for p in named.values()
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
        if self.optimizer is None:
            return
        if self.rule.clips_globally:
            assert square_norms is not None
            self._clip(self.params, global_norm(square_norms))
        elif self.rule.clip > 0:
            for name, square in self.square_norms().items():
                self._clip([name], math.sqrt(square))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rule.lr_at(step) * group["factor"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _clip(self, parts: Iterable[str], norm: float) -> None:
        """Shrink the gradients of some parts, whose norm is given, to the norm `clip`."""
        if norm > self.rule.clip:
            grads = [
                p.grad for name in parts for p in self.params[name].values() if p.grad is not None
            ]
            torch._foreach_mul_(grads, self.rule.clip / norm)

    def state(self) -> dict[str, Tensor]:
        """Optimizer state as `edge/parameter/slot` tensors."""
        if self.optimizer is None:
            return {}
        return {
            f"{edge}/{name}/{slot}": value.detach().cpu()
            for edge, named in self.params.items()
            for name, p in named.items()
            for slot, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the slots of the own parts out of `state`; parts without slots start anew."""
        if self.optimizer is None:
            return
        slots: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, value in state.items():
            edge, name, slot = key.split("/")
            slots.setdefault((edge, name), {})[slot] = value
        self.optimizer.state.clear()
        for edge, named in self.params.items():
            for name, p in named.items():
                mine = slots.get((edge, name))
                if mine:
                    # `step` is a scalar that fused optimizers want on the parameter's device
                    self.optimizer.state[p] = {k: v.clone().to(p.device) for k, v in mine.items()}


def global_norm(square_norms: Iterable[Mapping[str, float]]) -> float:
    """Norm over all parts; added up in the order of their names, wherever they live."""
    merged = {k: v for norms in square_norms for k, v in norms.items()}
    return math.sqrt(sum(merged[k] for k in sorted(merged)))
