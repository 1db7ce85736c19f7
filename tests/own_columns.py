"""Samples of several tensors and a network for them, as a user writes both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from treeprop_ray import TreeNetwork

G = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 9, (48, 5), generator=G)
SHARE = torch.rand(48, 5, generator=G)
Y = IDS.sum(1) % 2
NAMED = {"ids": IDS, "share": SHARE}


class Stem(nn.Module):
    """Tokens, each with its share: a dict, a tuple, or both in one tensor of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            ids, share = batch["ids"], batch["share"]
        elif isinstance(batch, tuple):
            ids, share = batch
        else:
            ids, share = batch[:, :5].long(), batch[:, 5:]
        assert ids.dtype == torch.int64 and share.dtype == torch.float32
        out: Tensor = (self.table(ids) * share.unsqueeze(-1)).mean(1)
        return out


def net(example: Any) -> TreeNetwork:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
    return TreeNetwork.from_blocks(Stem(), blocks, nn.Linear(6, 2), example=example)


def network(model: Any, shape: Any) -> TreeNetwork:
    assert shape.form.names == ("ids", "share") and shape.form.shapes == ((5,), (5,))
    return net({name: tensor[:2] for name, tensor in NAMED.items()})


class Rows(Dataset[Any]):
    """A sample is a dict, ((a, b), label) or (a, b, label)."""

    def __init__(self, kind: str = "dict") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        if self.kind == "dict":
            return {"share": SHARE[i], "label": int(Y[i]), "ids": IDS[i]}
        return ((IDS[i], SHARE[i]), Y[i]) if self.kind == "nested" else (IDS[i], SHARE[i], Y[i])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Rows("dict")[i] for i in range(48))


class One(IterableDataset[Any]):
    """The same in one tensor, with none of the package's help."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(ONE, Y, strict=True)


ONE = torch.cat([IDS.float(), SHARE], 1)


def hub() -> Any:
    import datasets

    columns = {"label": Y, "ids": IDS, "share": SHARE}
    return datasets.Dataset.from_dict(
        {"more": ["x"] * 48, **{k: v.tolist() for k, v in columns.items()}}
    )


def samples(data: Any) -> Any:
    rows = hub()
    return {"train": rows, "validation": rows, "test": rows}


def stream(data: Any) -> Any:
    return {"train": Stream(), "validation": Rows(), "test": Rows()}
