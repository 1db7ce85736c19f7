"""Decoded arrays on disk: written whole, with a checksum; a damaged one is made again."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from treeprop_ray.errors import first_line, warn

PART = 1 << 24


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """The array at `path`, memory-mapped; `make` gives it if it is not there, or not as it was."""
    if path.is_file():
        try:
            array = np.load(path, mmap_mode="c", allow_pickle=False)  # torch wants it writable
            _check(path)
            return array
        except (OSError, ValueError, EOFError) as e:
            warn(f"{path}: the cache is damaged ({first_line(e)}); it is made again")
    store(path, make())
    return np.load(path, mmap_mode="c", allow_pickle=False)


def store(path: Path, array: Any) -> None:
    """Write an array aside and rename it; then its checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp.npy")
    np.save(aside, array)
    _sum_file(path).unlink(missing_ok=True)
    aside.replace(path)
    _sum_file(path).write_text(checksum(path))


def checksum(path: Path) -> str:
    """crc32 of a file: against rotten bits, not against an enemy."""
    value = 0
    with path.open("rb") as f:
        while part := f.read(PART):
            value = zlib.crc32(part, value)
    return f"{value:08x}"


def _check(path: Path) -> None:
    """A cache of an earlier version has no checksum: it gets one."""
    file = _sum_file(path)
    if not file.is_file():
        file.write_text(checksum(path))
    elif file.read_text().strip() != checksum(path):
        raise ValueError("does not match its checksum")


def _sum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.crc32")
