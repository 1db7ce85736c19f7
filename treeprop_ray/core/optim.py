"""Optimizer of the parts a host owns: state keyed by edge, learning rate by the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.errors import TrainingError, UserError

GROWTH = 2000  # steps with finite gradients before a loss scale doubles
SCALE = "scale/loss/"  # begins the names of its numbers in a state
NUMBER = "#"  # ends the names of slots that are no tensors


class LossScale:
    """fp16: the factor on every loss. All hosts see the same norms, so they agree on it."""

    def __init__(self, scaled: bool) -> None:
        self.value = 2.0**16 if scaled else 1.0
        self.steps = 0  # since it has changed

    def update(self, fine: bool) -> None:
        """After a step, by whether all its gradients were finite."""
        self.steps = self.steps + 1 if fine else 0
        if not fine:
            self.value /= 2
        elif self.steps == GROWTH:
            self.value, self.steps = self.value * 2, 0
        if self.value < 1:
            raise TrainingError("precision=fp16: gradients are not finite at any loss scale")

    def state(self) -> dict[str, Tensor]:
        """As slots of an optimizer."""
        numbers = {"value": self.value, "steps": self.steps}
        return {SCALE + k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the numbers out of a state that has them."""
        if SCALE + "value" in state:
            self.value, self.steps = float(state[SCALE + "value"]), int(state[SCALE + "steps"])


class PartOptimizer:
    """Torch optimizers over several parts, whose state is read and written part by part.

    The part `first`, if it is here, has an optimizer of its own, so that its update can go ahead.
    """

    def __init__(
        self, parts: Mapping[str, nn.Module], rule: OptimizerRule, first: str = ""
    ) -> None:
        self.rule, self.scale, self.first = rule, LossScale(rule.scaled), first
        self.params = own_parameters(parts, first)
        self.norms: dict[str, float] | None = None  # of all gradients, where others have some
        self.only(self.named)

    def only(self, mine: Collection[str]) -> None:
        """Update some of the parameters, and leave the others to others; from the start."""
        self.mine, first = mine, self.first
        ahead = [name for name in self.params if name == first]
        rest = [name for name in self.params if name != first]
        self.optimizers = [(parts, o) for parts in (ahead, rest) if (o := self._make(parts))]
        self.owner = {
            p: optimizer
            for _, optimizers in self.optimizers
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._groups = [_scalars(o) for _, optimizers in self.optimizers for o in optimizers]

    def _make(self, parts: Sequence[str]) -> list[torch.optim.Optimizer]:
        """One optimizer of each kind; groups differ in learning rate or weight decay."""
        kinds: dict[str, dict[tuple[float, float], list[nn.Parameter]]] = {}
        for name in parts:
            factor = dict(self.rule.factors).get(name, 1.0)
            for key, p in self.params[name].items():
                if f"{name}/{key}" not in self.mine:
                    continue
                groups = kinds.setdefault(self.rule.kind_of(name, p), {})
                groups.setdefault((factor, self.rule.decay_of(p)), []).append(p)
        return [
            self.rule.make(kind, [
                {"params": params, "factor": factor, "weight_decay": decay}
                for (factor, decay), params in groups.items()
            ])
            for kind, groups in sorted(kinds.items())
        ]  # fmt: skip

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """All parameters, as `edge/parameter`."""
        return {f"{edge}/{k}": p for edge, named in self.params.items() for k, p in named.items()}

    def square_norms(self, parts: Iterable[str] | None = None) -> dict[str, float]:
        """Sum of squared gradients of every part, or of some."""
        norms = self.norms_here() if self.norms is None else self.norms
        out: dict[str, float] = {}
        for name in self.params if parts is None else parts:
            for key in self.params[name]:
                if (norm := norms.get(f"{name}/{key}")) is not None:
                    out[name] = out.get(name, 0.0) + norm * norm
        return out

    def norms_here(self) -> dict[str, float]:
        """The norm of every gradient that is here."""
        grads = {key: p.grad for key, p in self.named.items() if p.grad is not None}
        if not grads:
            return {}
        norms = torch.stack(torch._foreach_norm(list(grads.values()))).tolist()
        return dict(zip(grads, norms, strict=True))

    def step(self, step: int, square_norms: Iterable[Mapping[str, float]] | None) -> None:
        """One update; with clipping `square_norms` holds those of all hosts."""
        for update in self.turns(step, square_norms):
            update()

    def turns(
        self, step: int, square_norms: Iterable[Mapping[str, float]] | None
    ) -> list[Callable[[], None]]:
        """The update of the part that goes first, and that of the others."""
        norm, scale = None, self.scale.value
        if self.rule.exchanges:
            assert square_norms is not None
            norm = global_norm(square_norms)
        if norm is not None and self.rule.scaled:
            self.scale.update(fine := math.isfinite(norm))
            if not fine:
                return [self._leave_out]
        return [partial(self._update, step, norm, scale, *turn) for turn in self.optimizers]

    def _leave_out(self) -> None:
        """A step without an update."""
        for p in self.owner:
            p.grad = None

    def _update(
        self,
        step: int,
        norm: float | None,
        scale: float,
        parts: Sequence[str],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        if scale != 1:
            self._multiply(parts, 1 / scale)
        if norm is not None and self.rule.clips_globally:
            self._clip(parts, norm)
        elif self.rule.clip > 0:
            squares = self.square_norms(parts)
            for name in squares:
                self._clip([name], math.sqrt(squares[name]))
        lr = self.rule.lr_at(step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * self.rule.factor_at(step, group["factor"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _clip(self, parts: Iterable[str], norm: float) -> None:
        """Shrink the gradients of some parts, whose norm is given, to the norm `clip`."""
        if norm > self.rule.clip:
            self._multiply(parts, self.rule.clip / norm)

    def _multiply(self, parts: Iterable[str], factor: float) -> None:
        """All gradients of some parts; there may be none."""
        params = (p for name in parts for p in self.params[name].values())
        if grads := [p.grad for p in params if p.grad is not None]:
            torch._foreach_mul_(grads, factor)

    def begin_anew(self, part: str) -> None:
        """Drop the state of a part whose weights are others from now on."""
        for p in self.params[part].values():
            self.owner[p].state.pop(p, None)

    def state(self) -> dict[str, Tensor]:
        """Optimizer state as `edge/parameter/slot` tensors; a number is one of no dimension."""
        self._check_groups()
        slots = {
            f"{edge}/{name}/{slot}{NUMBER * (not isinstance(value, Tensor))}": _as_tensor(
                slot, value
            )
            for edge, named in self.params.items()
            for name, p in named.items()
            if p in self.owner
            for slot, value in self.owner[p].state.get(p, {}).items()
            if value is not None
        }
        return slots | self.scale.state() if self.rule.scaled else slots

    def _check_groups(self) -> None:
        """What an optimizer keeps in its groups belongs to no part, so it could not be stored."""
        optimizers = [o for _, optimizers in self.optimizers for o in optimizers]
        for optimizer, before in zip(optimizers, self._groups, strict=True):
            if changed := [k for k, v in _scalars(optimizer).items() if before.get(k) != v]:
                raise UserError(
                    f"optimizer={self.rule.kind}: keeps {changed[0][1]} in its parameter groups; "
                    "only what it keeps for each parameter can be stored"
                )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the slots of the own parts out of `state`; parts without slots start anew."""
        self.scale.load(state)
        slots: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key in state:
            edge, name, slot = key.split("/")
            if f"{edge}/{name}" in self.mine:  # others need not be read
                slots.setdefault((edge, name), {})[slot] = state[key]
        for edge, named in self.params.items():
            for name, p in named.items():
                if p not in self.owner:
                    continue
                self.owner[p].state.pop(p, None)
                # `step` is a scalar that fused optimizers want on the parameter's device
                if mine := slots.get((edge, name)):
                    self.owner[p].state[p] = {
                        k.removesuffix(NUMBER): v.item() if k.endswith(NUMBER)
                        else v.clone().to(p.device)
                        for k, v in mine.items()
                    }  # fmt: skip


def _as_tensor(slot: str, value: Any) -> Tensor:
    """A slot of an optimizer as a tensor."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise UserError(
        f"optimizer: keeps {slot} as {type(value).__name__}; only tensors and numbers can be stored"
    )


def _scalars(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Any]:
    """The numbers of an optimizer's groups, without what this module sets."""
    return {
        (i, key): value
        for i, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, bool | int | float) and key != "lr"
    }


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
