"""Samples with several tensors before the label: which they are, and one packed tensor of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treeprop_ray.core.inputs import Inputs
from treeprop_ray.errors import UserError


class Several(dict[str, Any]):
    """The inputs of a sample or of a batch, by name; of a tuple `named` is false."""

    def __init__(self, given: Mapping[str, Any], named: bool) -> None:
        super().__init__(given)
        self.named = named


def as_several(x: Any) -> Any:
    """Several inputs where x is a mapping, or a tuple or list of tensors; else x itself."""
    if isinstance(x, Mapping):
        return Several({str(key): x[key] for key in sorted(x, key=str)}, named=True)
    tensors = isinstance(x, tuple | list) and x and all(isinstance(t, Tensor) for t in x)
    return numbered(x) if tensors and any(t.numel() != 1 for t in x) else x


def numbered(values: Sequence[Any]) -> Several:
    """The inputs of a tuple."""
    return Several({f"input {i}": value for i, value in enumerate(values, 1)}, named=False)


def joined(samples: Sequence[Several], what: str) -> dict[str, list[Any]]:
    """The values of each input over some samples, which must all have the same ones."""
    names = list(samples[0])
    for sample in samples:
        if sample.keys() != samples[0].keys():
            a, b = (", ".join(map(str, some)) or "none" for some in (sample, names))
            raise UserError(f"{what}: samples differ: one has the inputs {a}, another {b}")
    return {name: [sample[name] for sample in samples] for name in names}


def packed(tensors: Mapping[str, Tensor], named: bool, count: int, what: str) -> tuple[Any, Inputs]:
    """A batch of `count` labels as one tensor, and its form; a misfit names the input."""
    if not tensors:
        raise UserError(f"{what}: a sample has no inputs")
    for name, tensor in tensors.items():
        if not tensor.ndim or len(tensor) != count:
            size = len(tensor) if tensor.ndim else 1
            raise UserError(
                f"{what} {name} has {size} samples, y has {count} labels; must be the same number"
            )
        if not tensor.numel() and count:
            raise UserError(f"{what} {name}: its samples are empty, of shape {tensor.shape[1:]}")
    form = Inputs.of(tensors, named)
    with torch.no_grad():
        return form.pack(tensors), form
