"""Weights as a .safetensors file that others may read, as the files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor

SLICE = 8 << 20  # bytes


def save(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name. The library's own file is for its owner alone, whatever the umask."""
    path.unlink(missing_ok=True)
    path.touch()  # with the rights that a new file has here
    mode = path.stat().st_mode
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    path.chmod(mode)


def slices(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of the file that `save` writes, a few at a time; nothing is copied."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in order:
        t, begin = tensors[name], end
        end += t.nbytes
        place = {"dtype": _kind(t.dtype), "shape": list(t.shape), "data_offsets": [begin, end]}
        header[name] = place
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that numbers are aligned
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        flat = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        for part in flat.split(SLICE) if len(flat) else ():
            yield memoryview(part.numpy())


def _kind(dtype: torch.dtype) -> str:
    """The name that the format has for a type."""
    length = 8  # of the length of the header, which is all there is
    text = to_bytes({"": torch.empty(0, dtype=dtype)})[length:]
    return str(json.loads(text)[""]["dtype"])
