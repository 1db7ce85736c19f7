"""Damaged data: one line with the file and the row; a rotten cache is made again."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from treeprop_ray import config
from treeprop_ray.data import cache, images, own
from treeprop_ray.errors import UserError

REPO = "ylecun/mnist"


def picture(value: int = 0) -> dict[str, bytes]:
    out = io.BytesIO()
    Image.new("L", (28, 28), value).save(out, "png")
    return {"bytes": out.getvalue()}


@pytest.fixture
def hub_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A small MNIST with these labels, in two files of three rows and one."""
    monkeypatch.setenv("TREEPROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))

    def make(labels: list[int | None]) -> Path:
        folder = tmp_path / "hub" / REPO
        folder.mkdir(parents=True)
        kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        for split in ("train", "test"):
            for k, part in enumerate((labels[:3], labels[3:])):
                columns = {"image": [picture(i) for i in range(len(part))], "label": part}
                rows = datasets.Dataset.from_dict(columns, kinds)
                rows.to_parquet(folder / f"{split}-{k:05d}-of-00002.parquet")
        return tmp_path / "hub"

    return make


def load(root: Path) -> Any:
    return images.mnist(config.load([f"data.root={root}"]).data)


@pytest.mark.parametrize("label", [99, -1, None])
def test_a_label_outside_the_classes_is_named_with_file_and_row(
    hub_of: Callable[..., Path], label: int | None
) -> None:
    root = hub_of([1, 2, 3, 4, label])
    with pytest.raises(UserError) as caught:
        load(root)
    text = str(caught.value)
    assert "train-00001-of-00002.parquet, row 1" in text and "\n" not in text
    assert f"label {label} is outside the classes 0 … 9" in text


@pytest.mark.parametrize("harm", [lambda raw: raw[:100], lambda raw: b"", lambda raw: b"x" * 999])
def test_a_corrupt_parquet_cannot_be_read(
    hub_of: Callable[..., Path], harm: Callable[[bytes], bytes]
) -> None:
    root = hub_of([1, 2, 3, 4])
    path = next((root / REPO).glob("train-00001*"))
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(UserError) as caught:
        load(root)
    text = str(caught.value)
    assert text.startswith(f"{path}: cannot be read: ") and "\n" not in text


@pytest.mark.parametrize("name", ["x.npy", "y.npy"])
def test_a_rotten_cache_is_made_again(
    hub_of: Callable[..., Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = hub_of([1, 2, 3, 4])
    whole = load(root).train
    x, y = whole.x.clone(), whole.y.clone()  # it is mapped into memory
    (path,) = (tmp_path / "cache").rglob(f"train-*/{name}")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # a bit of a pixel or a label: nobody would notice
    path.write_bytes(raw)
    again = load(root)
    assert torch.equal(again.train.x, x) and torch.equal(again.train.y, y)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: the cache is damaged (does not match its checksum)" in line
    path.write_bytes(raw[:50])
    assert torch.equal(load(root).train.y, y)


def test_a_cache_without_a_checksum_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(5))
    assert list(cache.cached(path, lambda: pytest.fail("it was there"))) == [0, 1, 2, 3, 4]
    assert (tmp_path / "x.npy.crc32").read_text() == cache.checksum(path)


def test_a_pixel_that_is_no_number_is_named_with_its_sample() -> None:
    x, y = torch.rand(6, 4), torch.arange(6) % 2
    x[3, 1] = float("nan")
    with pytest.raises(UserError, match="train: an input of sample 3 is nan"):
        own.own_set({"train": (x, y)}, None, 2)
    source = own.source_of(Pairs(x, y), None, 2, "train")
    assert source.take(slice(0, 3)).x.shape == (3, 4)
    with pytest.raises(UserError, match="train: an input of sample 3 is nan"):
        source.take(torch.tensor([5, 3, 1]))


def test_a_row_without_a_label_is_named() -> None:
    pairs = Pairs(torch.rand(6, 2), [1, 1, 1, 1, None, 1])
    source = own.source_of(pairs, None, 2, "train")
    with pytest.raises(UserError, match=r"train, labels: NoneType .* \(sample 4\)"):
        source.take(slice(0, 6))


class Pairs:
    """A map-style set."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.x[i], self.y[i]
