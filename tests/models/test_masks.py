"""Hugging Face models with attention_mask and token_type_ids: their logits, both engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_pretrained import model_of
from torch import Tensor
from torch.utils.data import DataLoader
from warm import warm_ray

from treeprop_ray import TreeNetwork, fit
from treeprop_ray.errors import UserError

TYPED = ("bert", "bert_classes", "roberta")
TEXT = ("gpt2", "llama", *TYPED)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def batch_of(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A model and tokens of which some rows end in padding that only the mask tells."""
    model, tokens = model_of(name)
    mask = torch.ones_like(tokens)
    mask[:3, 5:], mask[3:5, 7:] = 0, 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    if name in TYPED:
        types = torch.zeros_like(tokens)
        types[:, 3:] = 0 if name == "roberta" else 1  # it has a single type
        batch["token_type_ids"] = types
    return model, batch


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", TEXT)
def test_the_chain_has_transformers_logits_with_these_inputs(name: str, eager: bool) -> None:
    model, batch = batch_of(name)
    if eager:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**batch).logits
        without = model(batch["input_ids"]).logits
    network = TreeNetwork.from_pretrained(model).eval()
    with torch.no_grad():
        said = network(batch)
        assert torch.allclose(said, expected, atol=1e-6)
        assert eager or torch.equal(said, expected)
        assert torch.allclose(network(batch["input_ids"]), without, atol=1e-6)
    assert not torch.allclose(expected, without, atol=1e-5)


def test_padding_on_the_left_is_left_out_too() -> None:
    model, batch = batch_of("gpt2")
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    there = batch["attention_mask"] == 1
    with torch.no_grad():
        expected = model(**batch).logits[there]
        assert torch.allclose(TreeNetwork.from_pretrained(model)(batch)[there], expected, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert_classes"])
def test_both_engines_train_it_alike(name: str, local_ray: None) -> None:
    there = {"engine": "ray", "placement": "packed", "hosts": 2, "cpus_per_actor": 0.5}
    states = []
    for where in ({}, there):
        model, batch = batch_of(name)
        tokens = batch["input_ids"]
        labels = torch.arange(8) % 2
        if name != "bert_classes":
            labels = tokens.roll(-1, 1).masked_fill(batch["attention_mask"] == 0, -100)
        rows = [{**{k: v[i] for k, v in batch.items()}, "labels": labels[i]} for i in range(8)]
        network = TreeNetwork.from_pretrained(model)
        words: dict[str, Any] = {"epochs": 2, "sigma": 0.01, "microbatches": 2, **where}
        fit(network, DataLoader(rows, 4), columns=[*batch, "labels"], **words)  # type: ignore[arg-type]
        states.append(network.state_dict())
        assert network(batch).isfinite().all()
    one, many = states
    assert all(torch.equal(value, many[key]) for key, value in one.items())


def test_a_mask_is_worth_what_padding_by_the_config_is() -> None:
    states = []
    for masked in (False, True):
        model, batch = batch_of("llama")
        tokens = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 0)
        labels = tokens.roll(-1, 1).masked_fill(batch["attention_mask"] == 0, -100)
        network = TreeNetwork.from_pretrained(model, padding=not masked)
        given = {**batch, "input_ids": tokens} if masked else tokens
        fit(network, given, labels, batch=4, epochs=1, method="bp")  # no loss at padding's states
        states.append(network.state_dict())
    one, two = states
    assert all(torch.allclose(value, two[key], atol=1e-6) for key, value in one.items())


def test_a_column_that_a_model_does_not_take_is_one_line() -> None:
    model, batch = batch_of("gpt2")
    ids, labels = batch["input_ids"], torch.zeros(8, 9, dtype=torch.long)
    mask = batch["attention_mask"]
    for given, says in (
        ({**batch, "token_type_ids": ids}, "takes input_ids, attention_mask, not token_type_ids"),
        ({"attention_mask": mask}, "needs input_ids, samples have attention_mask"),
        ((ids, mask), "takes input_ids, attention_mask, not input 1"),
        ({**batch, "attention_mask": mask[:, :4]}, r"attention_mask has samples of shape \(4,\)"),
        ({"input_ids": ids.float(), "attention_mask": mask}, "input_ids must be whole numbers"),
    ):
        with pytest.raises(UserError, match=f"^columns: .*{says}") as caught:
            fit(TreeNetwork.from_pretrained(model), given, labels, batch=4)
        assert "\n" not in str(caught.value)
    vit, pictures = model_of("vit")
    with pytest.raises(UserError, match=r"^columns: ViTForImageClassification takes one tensor"):
        fit(TreeNetwork.from_pretrained(vit), {"pixel_values": pictures}, torch.arange(8) % 2)
