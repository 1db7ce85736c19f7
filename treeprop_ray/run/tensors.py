"""The tensors of one or several safetensors files, read one by one when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


class Tensors(Mapping[str, Tensor]):
    """By name; nothing stays in memory but what a caller keeps."""

    def __init__(self, files: Iterable[Path], keeps: object = None) -> None:
        """`keeps`: what must live as long as the files are read."""
        self.keeps = keeps
        self.homes: dict[str, Any] = {}
        for path in files:
            opened = safe_open(path, framework="pt")
            self.homes.update(dict.fromkeys(opened.keys(), opened))

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self.homes[key].get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.homes)

    def __len__(self) -> int:
        return len(self.homes)

    def __contains__(self, key: object) -> bool:
        return key in self.homes

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor, without reading it."""
        return tuple(self.homes[key].get_slice(key).get_shape())
