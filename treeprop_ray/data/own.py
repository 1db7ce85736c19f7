"""A user's own samples, of whatever kind, as a data set.

(x, y), (a, b, y), ({name: a, …}, y),
TensorDataset                               tensors or arrays in memory
torch Dataset, Hugging Face Dataset         by number: exact resume
IterableDataset, streaming Hugging Face,
DataLoader, ray.data.Dataset                streams: in their own order
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from treeprop_ray.core.rule import LossRule
from treeprop_ray.data.reading import drawing
from treeprop_ray.data.sets import DataSet
from treeprop_ray.data.several import Several
from treeprop_ray.data.sources import (
    PLAIN,
    Columns,
    Rows,
    Source,
    Split,
    as_tensor,
    batch_of_several,
    check_inputs,
    check_labels,
    pair_of,
    targets,
)
from treeprop_ray.data.streams import Stream, is_ray_data
from treeprop_ray.errors import UserError

SPLITS = ("train", "validation", "test")
MOST_HELD_OUT = 2**20  # samples of a held-out stream, which is kept in memory
KINDS = (
    "tensors or arrays (x, y), a torch Dataset, IterableDataset or DataLoader, a Hugging Face "
    "Dataset or IterableDataset, or a ray.data.Dataset"
)


def own_set(
    given: Mapping[str, Any],
    columns: Columns | None,
    batch: int,
    classes: int = 0,
    joined: int = 1,
    loss: LossRule = PLAIN,
) -> DataSet:
    """Splits by name as a data set; "train" must be there, others may be absent or None.

    `batch`: the samples of a step, `joined` of a loader's batches; labels are those of `loss`.
    """
    unknown = [str(name) for name in given if name not in SPLITS]
    if unknown or given.get("train") is None:
        have = ", ".join(map(str, given)) or "nothing"
        raise UserError(f"data: splits must be named train, validation and test, not {have}")
    train = source_of(given["train"], columns, batch, "train", joined)
    example = _example(train)
    guessed = classes == 0
    classes = classes or told_classes(given["train"], columns) or len(loss.class_weights)
    classes = classes or seen_classes(train, loss.ignore_index)
    none = example.take(slice(0, 0))
    validation, test = (
        none if given.get(name) is None else held_out(given[name], columns, name, example)
        for name in SPLITS[1:]
    )
    if guessed and classes and example.y.ndim > 1 and not example.y.is_floating_point():
        held = [
            highest(s.y, loss.ignore_index) + 1 for s in (validation, test) if isinstance(s, Split)
        ]
        classes = max(classes, *held, 0)  # not every token is in the training split
    if isinstance(train, Stream):  # its labels are looked at as they come
        train.classes, train.rule = classes, loss
    for name, split in zip(SPLITS, (train, validation, test), strict=True):
        if isinstance(split, Split):
            check_labels(targets(split.y), classes, name, loss, whole=True)
            check_inputs(split, name)
        elif split is not train:  # not only when it is scored, at the end
            check_labels(targets(_example(split).y), classes, name, loss)
    kinds = example.form.dtypes if example.form else (example.x.dtype,)
    dtype = next((kind for kind in kinds if kind.is_floating_point), torch.float32)
    return DataSet(
        "own", train, validation, test, classes, Tensor.clone, dtype, own=True, loss=loss
    )


def held_out(given: Any, columns: Columns | None, what: str, example: Split) -> Source:
    """A split that is scored again and again, with samples like those of train; a stream is read
    into memory."""
    source = source_of(given, columns, 0, what)
    if isinstance(source, Stream):
        source = source.whole(MOST_HELD_OUT)
    first = _example(source)
    if example.form or first.form:
        if first.form is None:
            raise UserError(f"{what}: has one tensor in a sample, train has {example.form}")
        first.form.check_same(example.form, what, "train has")
    for part in ("x", "y"):
        ours, theirs = getattr(example, part).shape[1:], getattr(first, part).shape[1:]
        if ours != theirs:
            raise UserError(
                f"{what}: {part} has samples of shape {tuple(theirs)}, train has {tuple(ours)}"
            )
    return source


def source_of(
    given: Any, columns: Columns | None, batch: int, what: str, joined: int = 1
) -> Source | Stream:
    """What a user gave for a split; `batch` is for streams (0: whatever comes)."""
    if isinstance(given, TensorDataset) and columns is None and len(given.tensors) > 1:
        given = given.tensors
    if isinstance(given, Split):
        given = (given.x, given.y)
    if isinstance(given, tuple | list):
        return _arrays(given, columns, what)
    if isinstance(given, DataLoader) or is_ray_data(given) or _is_hf(given, "IterableDataset"):
        return Stream(_chosen(given, columns, what), columns, batch, what, joined)
    if isinstance(given, IterableDataset):
        return Stream(given, columns, batch, what)
    if _is_hf(given, "Dataset") or isinstance(given, Dataset) or _is_map(given):
        try:
            rows = Rows(_chosen(given, columns, what), columns, what)
        except TypeError as e:
            raise UserError(f"{what}: {type(given).__name__} has no length; define __len__") from e
        if not len(rows):
            raise UserError(f"{what}: has no samples")
        return rows
    raise UserError(f"{what}: {type(given).__name__} is none of {KINDS}")


def _arrays(given: Any, columns: Columns | None, what: str) -> Split:
    pair, labels = pair_of(_in_memory(given, what), columns, what)
    y = as_tensor(labels, what)
    if isinstance(pair, Several):
        split = batch_of_several(pair, y, what)
        if not len(split):
            raise UserError(f"{what}: has no samples")
        return split
    x = as_tensor(pair, what)
    if not x.ndim or not y.ndim or len(x) != len(y):
        raise UserError(
            f"{what} x has {len(x) if x.ndim else 1} samples, y has {len(y) if y.ndim else 1} "
            "labels; must be the same number"
        )
    if not len(x):
        raise UserError(f"{what}: has no samples")
    return Split(x, y)


def _in_memory(given: Any, what: str) -> Any:
    """Whole splits: (x, y), ((a, b), y) or (a, b, y), where a and b are arrays too."""
    arrays = [hasattr(part, "shape") and len(part.shape) > 0 for part in given]
    if len(given) > 2 and not all(arrays):
        kind = f"{type(given).__name__} of {len(given)}"
        raise UserError(f"{what}: must give pairs (input, label), not {kind}")
    if len(given) == 2 and arrays[1] and isinstance(given[0], tuple | list):
        x, count = given[0], len(given[1])
        if len(x) != count and all(hasattr(part, "shape") and len(part) == count for part in x):
            return (*x, given[1])
    return given


def _is_hf(given: Any, kind: str) -> bool:
    """Whether this is a class of Hugging Face datasets; nothing is imported to ask."""
    return any(
        c.__name__ == kind and c.__module__.startswith("datasets.") for c in type(given).__mro__
    )


def _is_map(given: Any) -> bool:
    """Whether samples can be had by number; torch asks for no base class."""
    return (
        hasattr(given, "__getitem__")
        and hasattr(given, "__len__")
        and not isinstance(given, Mapping | str | Tensor)
        and not hasattr(given, "__array__")
    )


def _chosen(given: Any, columns: Columns | None, what: str) -> Any:
    """A Hugging Face set, reduced to the two columns: others need not be decoded."""
    names = getattr(given, "column_names", None)
    if not (_is_hf(given, "Dataset") or _is_hf(given, "IterableDataset")) or names is None:
        return given
    pair_of(dict.fromkeys(names), columns, what)
    return given.select_columns(list(columns or ()))


def highest(y: Tensor, ignored: int) -> int:
    """The highest label that counts; -1: there is none."""
    counted = y[y != ignored]
    return int(counted.max()) if counted.numel() else -1


def told_classes(given: Any, columns: Columns | None) -> int:
    """How many classes a Hugging Face set says it has; 0: it does not."""
    features = getattr(given, "features", None)
    if not columns or not isinstance(features, Mapping) or columns[-1] not in features:
        return 0
    return int(getattr(features[columns[-1]], "num_classes", 0) or 0)


def seen_classes(train: Source | Stream, ignored: int) -> int:
    """How many classes there are, as far as that is known without reading everything."""
    if not isinstance(train, Split):
        return 0
    y = train.y
    return y[0].numel() if y.is_floating_point() else max(1, highest(y, ignored) + 1)


def _example(train: Source | Stream) -> Split:
    if isinstance(train, Stream):
        assert train.example is not None
        return train.example
    with drawing(0):
        return train.take(slice(0, 1))


def columns_of(key: str, value: Any) -> Columns | None:
    """Names of inputs and, the last one, of labels, given as "img,label" or as a sequence."""
    if not value:
        return None
    names = value.split(",") if isinstance(value, str) else value
    names = [str(name).strip() for name in names]
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise UserError(
            f"{key}={','.join(names)}: two names, of the inputs and of the labels, or more, "
            "of which the last is the labels'"
        )
    return tuple(names)
