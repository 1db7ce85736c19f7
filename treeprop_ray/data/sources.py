"""Where samples come from: anything that can be asked for sample i is a `Source`.

    Split   tensors (or numpy arrays) in memory
    Rows    a torch Dataset, a Hugging Face Dataset: read when a batch is taken

A stream, which can only be read in order, is in data/streams.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from treeprop_ray.core.inputs import Inputs
from treeprop_ray.core.rule import LossRule
from treeprop_ray.data.several import Several, as_several, joined, numbered, packed
from treeprop_ray.errors import UserError, first_line

Columns = tuple[str, ...]  # the names of the inputs in a sample, and of the labels
PLAIN = LossRule()


class Source(Protocol):
    """Samples by number: the batch of a step is then a function of (seed, step)."""

    in_memory: bool  # reading ahead does not pay

    def __len__(self) -> int: ...
    def take(self, index: Tensor | slice) -> Split:
        """Some samples, in memory."""

    def part(self, index: Tensor) -> Source:
        """A source of these samples only."""


@dataclass(frozen=True)
class Split:
    """Samples as stored (images: uint8) and their labels."""

    x: Tensor
    y: Tensor
    form: Inputs | None = None  # of several inputs, which x has packed
    in_memory = True

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Tensor | slice) -> Split:
        """These samples, in this order."""
        return Split(self.x[index], self.y[index], self.form)

    def part(self, index: Tensor) -> Split:
        """A split of these samples alone."""
        return self.take(index)


class Rows:
    """Samples of a map-style set: pairs (input, label), or mappings with two named columns."""

    in_memory = False

    def __init__(
        self, rows: Any, columns: Columns | None, what: str, index: Tensor | None = None
    ) -> None:
        self.rows, self.columns, self.what = rows, columns, what
        self.index = torch.arange(len(rows)) if index is None else index
        self.form: Inputs | None = None  # of several inputs, once some have been read

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: Tensor | slice) -> Split:
        numbers = self.index[index].tolist()
        try:
            if hasattr(self.rows, "__getitems__"):
                samples = self.rows.__getitems__(numbers)
            else:
                samples = [self.rows[i] for i in numbers]
        except Exception as e:  # the user's own code may raise anything
            reason = f"{type(e).__name__}: {first_line(e)}"
            raise UserError(f"{self.what}: samples {short(numbers)}: {reason}") from e
        try:
            batch = collated(samples, self.columns, self.what)
        except UserError:
            for number, sample in zip(numbers, samples, strict=True):  # name the one, if it is one
                try:
                    collated([sample], self.columns, self.what)
                except UserError as e:
                    raise UserError(f"{e} (sample {number})") from e
            raise
        check_inputs(batch, self.what, numbers)
        if batch.form:
            self.form = self.form or batch.form
            batch.form.check_same(self.form, f"{self.what}: samples {short(numbers)}", "others")
        elif self.form:
            raise UserError(
                f"{self.what}: samples {short(numbers)}: have one input, others several"
            )
        return batch

    def part(self, index: Tensor) -> Rows:
        part = Rows(self.rows, self.columns, self.what, self.index[index])
        part.form = self.form
        return part


def short(numbers: Sequence[int]) -> str:
    """Some numbers for a message."""
    return ", ".join(map(str, numbers[:3])) + (", …" if len(numbers) > 3 else "")


def targets(y: Tensor) -> Tensor:
    """Labels as a loss takes them: whole numbers as int64, others as they are."""
    return y if y.is_floating_point() else y.long()


def check_labels(
    y: Tensor,
    classes: int,
    what: str,
    rule: LossRule = PLAIN,
    whole: bool = False,
    numbers: Sequence[int] | None = None,
) -> None:
    """Raise UserError where labels are not what the loss takes: outside the known classes, or for
    bce outside 0 … 1; a `whole` split has rows, others may have numbers of their samples."""
    highest: float
    if rule.name == "bce":
        known, highest = "0 … 1", 1
    elif rule.name == "cross_entropy" and not y.is_floating_point():
        highest = classes - 1 if classes else math.inf
        known = f"the classes 0 … {classes - 1}" if classes else "the classes, which begin at 0"
    else:
        return
    wrong = ((y < 0) | (y > highest)) & (y != rule.ignore_index)
    if wrong.any():
        at = int(wrong.nonzero()[0][0])
        row = f" (row {at})" if whole else f" (sample {numbers[at]})" if numbers else ""
        raise UserError(f"{what}: label {y[wrong][0].item():g} is outside {known}{row}")


def check_inputs(split: Split, what: str, numbers: Sequence[int] | None = None) -> None:
    """Raise UserError where an input is NaN or infinite, with the number of its sample."""
    if split.form is None:
        check_finite(split.x, what, numbers)
        return
    given = split.form.unpack(split.x)
    tensors = given.values() if isinstance(given, dict) else given
    for name, x in zip(split.form.names, tensors, strict=True):
        check_finite(x, what, numbers, name)


def check_finite(
    x: Tensor, what: str, numbers: Sequence[int] | None = None, name: str = "an input"
) -> None:
    """The same for one tensor."""
    if not x.is_floating_point() or not x.numel():
        return
    wrong = ~x.isfinite()
    if wrong.any():
        at = int(wrong.nonzero()[0][0])
        row = numbers[at] if numbers else at
        raise UserError(f"{what}: {name} of sample {row} is {float(x[wrong][0])}")


# -- samples to tensors ---------------------------------------------------------------------------


def as_tensor(value: Any, what: str) -> Tensor:
    """A number, list, array, tensor or picture; pictures become floats (C, H, W) in [0, 1]."""
    if isinstance(value, Tensor):
        return value
    try:
        if hasattr(value, "convert") and hasattr(value, "getbands"):  # a PIL image
            pixels = torch.from_numpy(np.array(value, dtype=np.float32) / 255)
            return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
        if hasattr(value, "to_numpy"):  # of pandas
            value = value.to_numpy()
        with warnings.catch_warnings():  # an array that must not be written to: nobody does
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as e:
        kind = type(value).__name__
        raise UserError(f"{what}: {kind} is no number, array or picture: {first_line(e)}") from e


def pair_of(sample: Any, columns: Columns | None, what: str) -> tuple[Any, Any]:
    """(input, label) of a sample or of a batch; several inputs are a `Several`."""
    if isinstance(sample, Mapping):
        have = ", ".join(map(str, sample))
        if columns is None:
            raise UserError(f"{what}: say which columns are inputs and labels, columns=…: {have}")
        for column in columns:
            if column not in sample:
                raise UserError(f"columns: {what} has no column {column}; it has {have}")
        *inputs, label = columns
        given = {column: sample[column] for column in inputs}
        return as_several(given if len(inputs) > 1 else sample[inputs[0]]), sample[label]
    if columns is not None:
        kind = type(sample).__name__
        raise UserError(f"columns={','.join(columns)}: {what} has no names ({kind} samples)")
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return as_several(sample[0]), sample[1]
    if isinstance(sample, tuple | list) and len(sample) > 2:
        return numbered(sample[:-1]), sample[-1]
    size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
    kind = f"{type(sample).__name__}{size}"
    raise UserError(f"{what}: must give pairs (input, label), not {kind}")


def collated(samples: Sequence[Any], columns: Columns | None, what: str) -> Split:
    """Samples as one batch."""
    xs, ys = zip(*(pair_of(sample, columns, what) for sample in samples), strict=True)
    y = stacked(ys, "labels", what)
    if not any(isinstance(x, Several) for x in xs):
        return Split(stacked(xs, "inputs", what), y)
    if not all(isinstance(x, Several) for x in xs):
        raise UserError(f"{what}: samples differ: some have several inputs, some have one")
    tensors = {name: stacked(some, name, what) for name, some in joined(xs, what).items()}
    x, form = packed(tensors, xs[0].named, len(y), what)
    return Split(x, y, form)


def stacked(values: Sequence[Any], name: str, what: str) -> Tensor:
    """The values of some samples as one tensor."""
    tensors = [as_tensor(value, f"{what}, {name}") for value in values]
    shapes = {(tuple(t.shape), t.dtype) for t in tensors}
    if len(shapes) > 1:
        (a, of_a), (b, of_b), *_ = sorted(shapes, key=str)
        raise UserError(
            f"{what}: {name} of one batch differ: shape {a} {of_a} and shape {b} {of_b}"
        )
    return torch.stack(tensors)


def batch_of_several(x: Several, y: Tensor, what: str) -> Split:
    """Several inputs, each of a whole batch, and its labels."""
    tensors = {name: as_tensor(value, f"{what}, {name}") for name, value in x.items()}
    one, form = packed(tensors, x.named, len(y) if y.ndim else 1, what)
    return Split(one, y, form)
