"""Weights as a .safetensors file that others may read, as the files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name. The library's own file is for its owner alone, whatever the umask."""
    path.unlink(missing_ok=True)
    path.touch()  # with the rights that a new file has here
    mode = path.stat().st_mode
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    path.chmod(mode)
