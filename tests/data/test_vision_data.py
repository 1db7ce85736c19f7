"""Colour images from the hub layout, and their augmentation."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Result
from PIL import Image

from treeprop_ray import config, data
from treeprop_ray.data import Batches, DataSet, Scoring, Split, Training
from treeprop_ray.data.augment import augment_of, crop_flip, standard
from treeprop_ray.data.images import unit_scale
from treeprop_ray.errors import UserError


def images(samples: int = 64, side: int = 32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (samples, 3, side, side), generator=generator, dtype=torch.uint8)


def batches(augment: str, seed: int = 1) -> Batches:
    split = Split(images(), torch.arange(64) % 10)
    samples = DataSet(
        "random", split, split, split, 10, unit_scale, augment=augment_of(augment, 16)
    )
    return Batches(samples, 32, seed)


def test_samples_of_a_group_share_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeprop_ray.data.augment.crop_flip", lambda x, seed: x.clone())
    alike = images(1).expand(32, -1, -1, -1)

    def kinds(group: int) -> list[int]:
        """How many different pictures there are in each run of 16."""
        found = augment_of("standard", group)
        assert found is not None
        return [len(set(map(hash, map(bytes, run.numpy())))) for run in found(alike, 3).split(16)]

    assert kinds(16) == [1, 1] and min(kinds(1)) > 8


# -- loaders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "side", "classes"),
    [("cifar10", 32, 10), ("cifar100", 32, 100), ("tinyimagenet", 64, 200)],
)
def test_real_images_load_normalised(
    hub: Path, name: str, side: int, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEPROP_CACHE", str(tmp_path))
    settings = config.load([f"experiment={name}_vit_small", f"data.root={hub}"])
    samples = data.load(settings)
    assert samples.input_shape == (3, side, side) and samples.classes == classes
    assert set(samples.test.y.tolist()) == set(range(classes))
    assert samples.train.x.dtype == torch.uint8
    some = samples.inputs(samples.train.x[::5])
    assert some.mean((0, 2, 3)).abs().max() < 0.05
    assert (some.std((0, 2, 3)) - 1).abs().max() < 0.05
    # the second start reads the decoded arrays
    monkeypatch.setattr("treeprop_ray.data.images.load_split", None)
    assert torch.equal(data.load(settings).test.x, samples.test.x)


def picture(mode: str = "RGB", side: int = 64, seed: int = 0) -> bytes:
    shape = (side, side) if mode == "L" else (side, side, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels, mode).save(out, "PNG")
    return out.getvalue()


def write_hub(root: Path, pictures: list[bytes]) -> None:
    """A TinyImageNet of our own in the hub's layout."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {
        "image": [{"bytes": p, "path": None} for p in pictures],
        "label": [i % 200 for i in range(len(pictures))],
    }
    made = datasets.Dataset.from_dict(rows, features=features)
    folder = root / "zh-plus" / "tiny-imagenet"
    folder.mkdir(parents=True)
    for split in ("train", "valid"):
        made.to_parquet(folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bytes]], DataSet]:
    monkeypatch.setenv("TREEPROP_CACHE", str(tmp_path / "cache"))

    def load(pictures: list[bytes]) -> DataSet:
        write_hub(tmp_path / "hub", pictures)
        return data.load(
            config.load(["experiment=tinyimagenet_vit", f"data.root={tmp_path / 'hub'}"])
        )

    return load


def test_grey_pictures_become_rgb(tiny: Callable[[list[bytes]], DataSet]) -> None:
    samples = tiny([picture(), picture("L", seed=1), picture(seed=2)])
    grey, colour = samples.test.x[1], samples.test.x[2]
    assert torch.equal(grey[0], grey[1]) and torch.equal(grey[0], grey[2])
    assert not torch.equal(colour[0], colour[1])


def test_the_real_set_has_grey_pictures(hub: Path) -> None:
    """What the conversion is for: without it the decoder would meet images of one channel."""
    import datasets

    path = next((hub / "hub").glob("zh-plus/tiny-imagenet/valid-*.parquet"), None)
    if path is None:
        pytest.skip("TinyImageNet is not under TREEPROP_DATA")
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train")
    assert any(rows[i]["image"].mode == "L" for i in range(len(rows)))


@pytest.mark.parametrize("damage", ["truncated", "no image"])
def test_a_damaged_image_is_named(tiny: Callable[[list[bytes]], DataSet], damage: str) -> None:
    bad = picture()[:2000] if damage == "truncated" else b"not an image"
    with pytest.raises(UserError, match=r"parquet, row 1: image 1 of split train is damaged") as e:
        tiny([picture(), bad])
    assert "\n" not in str(e.value)


def test_a_picture_of_another_size_is_named(tiny: Callable[[list[bytes]], DataSet]) -> None:
    with pytest.raises(UserError, match=r"image 2 of split train has shape \(3, 32, 32\)"):
        tiny([picture(), picture(), picture(side=32)])


# -- augmentation -------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", ["crop_flip", "standard"])
def test_an_augmented_batch_is_a_function_of_seed_and_step(augment: str) -> None:
    straight, jumping = batches(augment), batches(augment)
    for step in range(3):
        straight(step)
        torch.rand(7)  # the state of torch's own generator has no say
    x, y = jumping(2)
    again = straight(2)
    assert torch.equal(x, again[0]) and torch.equal(y, again[1])
    assert not torch.equal(x, batches(augment, seed=2)(2)[0])


@pytest.mark.parametrize("augment", [crop_flip, standard])
def test_other_steps_draw_other_augmentations(
    augment: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    x = images()
    kept = x.clone()
    first, second = augment(x, 1), augment(x, 2)
    assert first.shape == x.shape and first.dtype == torch.uint8
    assert torch.equal(x, kept)  # the stored images are not touched
    assert not torch.equal(first, second)
    assert torch.equal(first, augment(x, 1))


def test_augmenting_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    standard(images(), 1)
    assert torch.equal(torch.rand(3), expected)


def test_crop_and_flip_move_pixels_within_an_eighth_of_the_side() -> None:
    x = torch.zeros(400, 1, 32, 32, dtype=torch.uint8)
    x[:, :, 16, 20] = 255
    moved = crop_flip(x, 3).flatten(1).argmax(1)
    rows, columns = moved // 32, moved % 32
    assert set((rows - 16).tolist()) == set(range(-4, 5))
    # mirrored, column 20 is column 11
    assert set(columns.tolist()) == set(range(20 - 4, 20 + 5)) | set(range(11 - 4, 11 + 5))


def test_groups_of_a_batch_get_different_operations() -> None:
    """One picture in all places: RandAugment treats groups, crop and flip every sample."""
    x = images(1).expand(256, -1, -1, -1).contiguous()
    brightness = standard(x, 1).float().mean((1, 2, 3)).view(16, 16)
    assert brightness.mean(1).std() > 2


def test_evaluation_is_never_augmented() -> None:
    plain, augmented = batches("none"), batches("standard")
    for split in ("train", "validation", "test"):
        assert torch.equal(
            plain.get(Scoring(split, 0))[0],
            augmented.get(Scoring(split, 0))[0],
        )
    # the training batch of a step is what the step saw
    assert torch.equal(augmented.get(Training(3))[0], augmented(3)[0])


def test_an_unknown_augmentation_is_one_line(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    result = command("train", "data.augment=wild", f"out={tmp_path / 'runs'}")
    assert result.code == 2 and "none, crop_flip, standard" in result.err
