from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Result

from treeprop_ray import config, data
from treeprop_ray.core.rng import normal_rows
from treeprop_ray.data import Batches
from treeprop_ray.errors import UserError


def test_an_epoch_shows_every_sample_once_and_another_epoch_another_order() -> None:
    samples = data.load(config.load([]))
    batches = Batches(samples, 100, seed=1)
    per_epoch = batches.per_epoch
    assert per_epoch == len(samples.train) // 100
    seen = [torch.cat([batches(e * per_epoch + i)[0] for i in range(per_epoch)]) for e in (0, 1)]
    assert not torch.equal(seen[0], seen[1])
    assert len(torch.unique(seen[0].flatten(1), dim=0)) > 0.99 * len(seen[0])


def test_the_batch_of_a_step_does_not_depend_on_what_came_before() -> None:
    samples = data.load(config.load([]))
    straight, jumping = Batches(samples, 64, 3), Batches(samples, 64, 3)
    for step in (0, 5, 30):
        straight(step)
    x, y = jumping(30)
    again = straight(30)
    assert torch.equal(x, again[0]) and torch.equal(y, again[1])
    assert not torch.equal(x, Batches(samples, 64, 4)(30)[0])


def test_validation_is_held_out_of_train() -> None:
    samples = data.load(config.load(["data.validation=0.2"]))
    assert len(samples.train) + len(samples.validation) == 1797 - 360
    assert len(samples.validation) == round(0.2 * 1437)
    rows = lambda split: {tuple(r.tolist()) for r in split.x.flatten(1)}  # noqa: E731
    assert not rows(samples.train) & rows(samples.validation)


def test_limit_takes_so_many_training_samples() -> None:
    assert len(data.load(config.load(["data.limit=100"])).train) == 100


def test_mnist_from_the_hub_layout(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEPROP_CACHE", str(tmp_path))
    settings = config.load(["experiment=mnist_d2", f"data.root={hub}"])
    samples = data.load(settings)
    assert (len(samples.train), len(samples.validation), len(samples.test)) == (54000, 6000, 10000)
    assert samples.input_shape == (1, 28, 28)
    assert samples.test.y[:5].tolist() == [7, 2, 1, 0, 4]
    x = samples.inputs(samples.test.x[:1])
    assert x.min() >= 0 and x.max() == 1
    # the second start reads the decoded arrays
    monkeypatch.setattr("treeprop_ray.data.images.load_split", None)
    assert torch.equal(data.load(settings).test.x, samples.test.x)


def test_a_set_that_is_not_there_names_two_ways_to_get_it(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TREEPROP_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:9")
    monkeypatch.setenv("TREEPROP_CACHE", str(tmp_path))
    result = command("train", "experiment=mnist_d3", f"out={tmp_path / 'runs'}")
    assert result.code == 2 and len(result.error_lines) == 1
    assert "data.root" in result.err and "TREEPROP_DATA" in result.err and "hub" in result.err


def test_a_root_without_the_split_is_named(tmp_path: Path) -> None:
    (tmp_path / "ylecun" / "mnist").mkdir(parents=True)
    with pytest.raises(UserError, match="no split train"):
        data.load(config.load(["experiment=mnist_d3", f"data.root={tmp_path}"]))


def test_noise_of_a_place_does_not_depend_on_the_cut() -> None:
    like = torch.zeros(10, 3, 2)
    whole = normal_rows(like, range(10), 1, "noise", 7, 4)
    parts = torch.cat(
        [
            normal_rows(like[a:b], range(a, b), 1, "noise", 7, 4)
            for a, b in ((0, 3), (3, 4), (4, 10))
        ]
    )
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, normal_rows(like, range(10), 1, "noise", 8, 4))
    assert not torch.equal(whole, normal_rows(like, range(10), 1, "noise", 7, 5))
    big = normal_rows(torch.zeros(400, 50), range(400), 2, "noise", 0, 1)
    assert abs(big.mean()) < 0.02 and abs(big.std() - 1) < 0.02
