"""Own samples of every kind: the same weights whatever they come in, and one line for mistakes."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import tiny_network
from own_data import WORDS, MapStyle, Noisy, Plain, Stateful, X, Y, rows
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from treeprop_ray import Callback, fit
from treeprop_ray.core.rule import LossRule
from treeprop_ray.data import Batches
from treeprop_ray.data.own import own_set
from treeprop_ray.data.reading import Ahead, drawing
from treeprop_ray.data.streams import resumed
from treeprop_ray.errors import UserError


def trained(*data: Any, **words: Any) -> dict[str, Tensor]:
    return fit(tiny_network(4).float(), *data, **{**WORDS, **words}).network.state_dict()


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


# -- kinds ----------------------------------------------------------------------------------------


def test_tensors_arrays_map_style_and_hugging_face_give_the_same_weights() -> None:
    expected = trained(X, Y)
    assert_same(trained(X.numpy(), Y.numpy()), expected)
    assert_same(trained((X, Y)), expected)
    assert_same(trained(X.double().numpy(), Y.numpy()), expected)  # the floats of the network
    assert_same(trained(pd.DataFrame(X.numpy()), pd.Series(Y.numpy())), expected)
    assert_same(trained(TensorDataset(X, Y)), expected)
    assert_same(trained(MapStyle()), expected)
    assert_same(trained(rows(), columns=("img", "label")), expected)
    assert_same(trained(rows().with_format("torch"), columns=("img", "label")), expected)
    splits = datasets.DatasetDict({"train": rows(), "validation": rows()})
    assert_same(trained(splits, columns="img,label"), expected)


def test_streams_in_the_same_order_give_the_same_weights() -> None:
    expected = trained(Plain())
    assert_same(trained(Stateful()), expected)
    assert_same(trained(DataLoader(MapStyle(), 8), epochs=3), expected)
    assert_same(trained(DataLoader(MapStyle(), 8, num_workers=1)), expected)
    stream = rows().to_iterable_dataset(num_shards=2)
    assert_same(trained(stream, columns=("img", "label")), expected)
    assert_same(trained(stream.with_format("torch"), columns=("img", "label")), expected)


def test_a_loader_brings_its_batch_size_its_collation_and_its_order() -> None:
    def doubled(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return 2 * torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

    by_loader = trained(DataLoader(MapStyle(), 8, collate_fn=doubled))
    assert_same(by_loader, trained(DataLoader(MapStyle(2 * X), 8)))
    words = {k: v for k, v in WORDS.items() if k != "batch"}
    taken = fit(tiny_network(4).float(), DataLoader(MapStyle(2 * X), 8), **words)
    assert_same(taken.network.state_dict(), by_loader)
    by_sampler = DataLoader(MapStyle(2 * X), batch_sampler=BatchSampler(range(50), 8, False))
    assert_same(fit(tiny_network(4).float(), by_sampler, **words).network.state_dict(), by_loader)
    with pytest.raises(UserError, match=r"batch=16: train is a DataLoader with batches of 8"):
        trained(DataLoader(MapStyle(), 8), batch=16)
    with pytest.raises(UserError, match=r"batch=80: train has not as many samples"):
        trained(DataLoader(MapStyle(), 80), batch=80)


def test_accumulation_joins_the_batches_of_a_loader() -> None:
    words = {"steps": 6, "accumulate": 2}
    joined = trained(DataLoader(MapStyle(), 8), **words)
    assert_same(joined, trained(Plain(), **words))
    assert_same(trained(MapStyle(), **words), trained(X, Y, **words))


def test_a_shuffling_loader_depends_on_the_seed_alone() -> None:
    shuffled = [DataLoader(MapStyle(), 8, shuffle=True) for _ in range(3)]
    first = trained(shuffled[0], seed=1)
    torch.manual_seed(99)
    assert_same(trained(shuffled[1], seed=1), first)
    other = trained(shuffled[2], seed=2)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_a_stream_without_length_has_epochs_of_so_many_steps() -> None:
    epochs: list[int] = []

    class Count(Callback):
        def on_epoch(self, run: Any, epoch: int, scores: Any) -> None:
            epochs.append(epoch)

    words = {"validation": MapStyle(), "callbacks": [Count()]}
    by_epochs = trained(Plain(), steps=0, epochs=3, epoch_steps=4, **words)
    assert epochs == [1, 2, 3]
    assert_same(trained(Plain()), by_epochs)
    with pytest.raises(UserError, match=r"data.epoch_steps=4: own knows that an epoch has 6"):
        trained(MapStyle(), epoch_steps=4)


def test_held_out_splits_are_scored_whatever_they_come_in() -> None:
    seen: list[float] = []

    class Watch(Callback):
        def on_end(self, run: Any, summary: dict[str, Any]) -> None:
            seen.append(summary["final"]["validation"]["full"]["loss"])
            assert summary["final"]["test"]["full"]["loss"] == seen[-1]

    kinds = [(X, Y), MapStyle(), DataLoader(MapStyle(), 7), Plain(), rows(),
             rows().to_iterable_dataset().with_format("torch")]  # fmt: skip
    for held in kinds:
        named = hasattr(held, "column_names")
        train = rows() if named else MapStyle()
        words = {"columns": ("img", "label")} if named else {}
        trained(train, validation=held, test=held, callbacks=[Watch()], **words)
    assert len(seen) == len(kinds) and len(set(seen)) == 1


# -- the batch of a step --------------------------------------------------------------------------


def test_random_augmentation_is_a_function_of_seed_and_step() -> None:
    data = own_set({"train": Noisy()}, None, 8)
    straight, jumping = Batches(data, 8, 3, steps=9), Batches(data, 8, 3, steps=9)
    torch.manual_seed(1)
    batches = [straight(step) for step in range(9)]
    torch.manual_seed(2)
    random.seed(5)
    for step in (7, 2, 3, 0, 8):
        assert torch.equal(jumping(step)[0], batches[step][0])
    assert not torch.equal(Batches(data, 8, 4, steps=8)(7)[0], batches[7][0])


def test_reading_ahead_leaves_the_generators_of_training_alone() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    with drawing(1):
        one = torch.rand(3), random.random(), np.random.rand(), torch.empty(2).uniform_()
    with drawing(1):
        two = torch.rand(3), random.random(), np.random.rand(), torch.empty(2).uniform_()
    assert torch.equal(one[0], two[0]) and one[1:3] == two[1:3] and torch.equal(one[3], two[3])
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_a_thread_reads_the_next_batches_and_no_further_than_the_run() -> None:
    read: list[int] = []
    ahead = Ahead(lambda step: read.append(step) or step, last=4)
    assert ahead(0) == 0
    ahead.settle()
    assert set(read) <= {0, 1, 2} and ahead(3) == 3 and ahead(1) == 1
    ahead.settle()
    assert max(read) == 3
    ahead.close()


def test_a_process_that_the_reading_thread_forks_ends_well() -> None:
    """As a loader's workers do; torch calls them failed otherwise, in the midst of training."""

    def fork(step: int) -> int | None:
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        return process.exitcode

    ahead = Ahead(fork, last=1)
    assert ahead(0) == 0
    ahead.close()


@pytest.mark.parametrize("make", [Plain, Stateful, lambda: DataLoader(Noisy(), 8, shuffle=True)])
def test_a_stream_goes_back_to_a_state_by_memory_and_by_reading_again(make: Any) -> None:
    def batches(keep: int) -> Batches:
        return Batches(own_set({"train": make()}, None, 8), 8, 1, 100, keep)

    straight = batches(0)
    expected = [straight(step)[0] for step in range(30)]
    kept = batches(50)
    states = []
    for step in range(20):
        states.append(kept.state())
        assert torch.equal(kept(step)[0], expected[step])
    for reader in (kept, batches(0), batches(0)):  # in memory; as after a kill
        reader.load(states[9])
        for step in range(9, 25):
            assert torch.equal(reader(step)[0], expected[step])
        reader.load(states[3])
        assert torch.equal(reader(3)[0], expected[3])
        assert torch.equal(reader(4)[0], expected[4])


def test_a_taken_up_stream_goes_on_if_it_has_a_state_and_else_starts_anew() -> None:
    for make, goes_on in ((Plain, False), (Stateful, True)):
        data = own_set({"train": make()}, None, 8)
        assert data.resumes is goes_on
        first = Batches(data, 8, 1)
        expected = [first(step)[0] for step in range(9)]
        first.load({})
        stored = Batches(data, 8, 1)
        for step in range(4):
            stored(step)
        anew = Batches(own_set({"train": make()}, None, 8), 8, 1)
        anew.load(resumed(stored.state()))
        assert torch.equal(anew(4)[0], expected[4 if goes_on else 0])
        assert torch.equal(anew(5)[0], expected[5 if goes_on else 1])
        again = Batches(own_set({"train": make()}, None, 8), 8, 1)
        again.load(anew.state())  # a killed actor of the run that was taken up
        assert torch.equal(again(6)[0], expected[6 if goes_on else 2])


def test_a_shuffled_hugging_face_stream_changes_its_order_with_every_pass() -> None:
    stream = rows().to_iterable_dataset(num_shards=2).with_format("torch")
    shuffled = stream.shuffle(seed=3, buffer_size=16)
    data = own_set({"train": shuffled}, ("img", "label"), 10)
    assert not data.resumes and own_set({"train": stream}, ("img", "label"), 10).resumes
    batches = Batches(data, 10, 1)
    passes = [torch.cat([batches(5 * e + k)[0] for k in range(5)]) for e in (0, 1)]
    assert not torch.equal(*passes)
    assert torch.equal(*(p.sort(0).values for p in passes))


def test_pictures_become_floats_with_channels_first() -> None:
    pictures = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    stored = datasets.Dataset.from_dict(
        {"img": list(pictures), "label": [0, 1]},
        features=datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")}),
    )
    x, y = Batches(own_set({"train": stored}, ("img", "label"), 2), 2, 1)(0)
    order = y.tolist()
    assert torch.equal(x, torch.from_numpy(pictures).permute(0, 3, 1, 2).float()[order] / 255)


# -- mistakes -------------------------------------------------------------------------------------


class Uneven(Plain):
    def __iter__(self) -> Iterator[Any]:
        for i in range(50):
            yield X[i, : 5 if i < 16 else 4], Y[i]


class Broken(MapStyle):
    def __getitem__(self, i: int) -> Any:
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("data", "words", "line"),
    [
        ((X, Y.float()), {}, "labels must be whole numbers, not torch.float32"),
        ((DataLoader(MapStyle(), 8), Y), {}, "is no number, array or picture"),
        ((X, Y[:-1]), {}, "train x has 50 samples, y has 49 labels"),
        ((X[:0], Y[:0]), {}, "train: has no samples"),
        ((X,), {}, "train: Tensor is none of tensors or arrays"),
        (([(1.0, 2)] * 3,), {}, "must give pairs"),
        ((MapStyle(X[:0]),), {}, "train: has no samples"),
        ((Plain(0),), {}, "train: has no samples"),
        ((Plain(3),), {}, "a pass has no whole batch of 8"),
        ((Plain(),), {"steps": 0}, "steps=0: own is a stream of unknown length"),
        ((Uneven(),), {}, "train: batches differ: x has samples of shape (4,)"),
        ((Broken(),), {}, "OSError: the disk is gone"),
        ((rows(),), {}, "say which columns are inputs and labels, columns=…: more, img"),
        ((rows(),), {"columns": ("img", "y")}, "has no column y; it has more, img, label"),
        ((rows(),), {"columns": ("img",)}, "columns=img: two names"),
        ((MapStyle(),), {"columns": ("img", "y")}, "columns=img,y: train has no names"),
        ((X, Y - 1), {}, "train: label -1 is outside the classes 0 … 1"),
        ((X, Y), {"validation": (X, Y + 1)}, "validation: label 3 is outside the classes 0 … 2"),
        ((X, Y), {"test": MapStyle(X, Y - 1)}, "test: label -1 is outside the classes 0 … 2"),
        ((MapStyle(X, Y - 1),), {}, "label -1 is outside the classes, which begin at 0"),
        ((X, Y), {"validation": (X[:, :4], Y)}, "validation: x has samples of shape (4,)"),
        ((X, Y), {"test": (X, Y[:3])}, "test x has 50 samples, y has 3 labels"),
        (({"train": (X, Y), "valid": (X, Y)},), {}, "must be named train, validation and test"),
        (({"train": (X, Y), "test": (X, Y)},), {"test": (X, Y)}, "has a split test already"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(data: Any, words: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        trained(*data, **words)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def spoilt(what: str) -> list[tuple[Tensor, Tensor]]:
    """Samples of which the fourteenth is wrong."""
    x, y = X.clone(), Y.clone()
    if what == "label":
        y[13] = 7
    else:
        x[13, 2] = float(what)
    return list(zip(x, y, strict=True))


class Spoilt(IterableDataset[Any]):
    def __init__(self, what: str) -> None:
        self.samples = spoilt(what)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("nan", "train: an input of sample 13 is nan (batch of step 1)"),
        ("-inf", "train: an input of sample 13 is -inf (batch of step 1)"),
        ("label", "train: label 7 is outside the classes 0 … 2 (sample 13) (batch of step 1)"),
    ],
)
def test_a_wrong_sample_of_a_stream_is_named_by_its_number(
    what: str, line: str, loader: bool
) -> None:
    given: Any = DataLoader(Spoilt(what), batch_size=8) if loader else Spoilt(what)
    batches = Batches(own_set({"train": given}, None, 8, classes=3), 8, 1)
    batches(0)
    with pytest.raises(UserError) as caught:
        batches(1)
    assert str(caught.value) == line
    fine = Batches(own_set({"train": given}, None, 8, loss=LossRule(ignore_index=7)), 8, 1)
    if what == "label":
        fine(1)


def test_labels_outside_the_features_classes_are_refused() -> None:
    def odd() -> Any:
        stored = rows()
        return stored.map(lambda row: {"label": 2}, keep_in_memory=True)

    data = own_set({"train": odd()}, ("img", "label"), 8, classes=2)
    with pytest.raises(UserError, match="label 2 is outside the classes 0 … 1"):
        Batches(data, 8, 1)(0)
