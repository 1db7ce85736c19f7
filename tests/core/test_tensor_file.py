"""The file in slices is the library's own, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from treeprop_ray.core import tensor_file

CASES: dict[str, dict[str, Tensor]] = {
    "a network and its optimizer": {
        "4-6/weight": torch.randn(3, 5),
        "4-6/weight/step": torch.tensor(3.0),
        "stem/token": torch.arange(7),
        "stem/größe": torch.randn(2, 3, 4).transpose(0, 1),
        "half": torch.randn(5).bfloat16(),
        "bits": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
    },
    "no tensor": {},
}


@pytest.mark.parametrize("tensors", CASES.values(), ids=CASES.keys())
def test_slices_are_the_librarys_file(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "SLICE", 16)
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.write_bytes(b"".join(tensor_file.slices(tensors)))
    tensor_file.save(tensors, theirs)
    assert mine.read_bytes() == theirs.read_bytes()
    read = load_file(mine)
    assert all(torch.equal(read[name], t) for name, t in tensors.items())
