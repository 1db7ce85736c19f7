"""Text: windows without overlap, tokenised once; scores that do not depend on how text is cut."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Result

from treeprop_ray import config, data
from treeprop_ray.data import text
from treeprop_ray.errors import UserError

Command = Callable[..., Result]
TINY = ["experiment=text_small", "model.hidden=12", "model.heads=3", "data.length=16", "batch=8"]


def write_wikitext(root: Path, lines: dict[str, list[str]]) -> None:
    """A hub folder with a small WikiText-2."""
    import datasets

    folder = root / "Salesforce/wikitext/wikitext-2-v1"
    folder.mkdir(parents=True)
    for split, rows in lines.items():
        made = datasets.Dataset.from_dict({"text": rows})
        made.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))


def test_windows_cover_the_text_once_and_labels_are_the_next_token() -> None:
    tokens = torch.arange(24, dtype=torch.int32)
    split = text.windows(tokens, 5, "x")
    assert split.x.tolist() == [[5 * i + j for j in range(5)] for i in range(4)]
    assert torch.equal(split.y, split.x + 1)
    assert split.x.data_ptr() == tokens.data_ptr()  # a view: a large text is not copied
    with pytest.raises(UserError, match=r"data.length=24: x has only 24 tokens"):
        text.windows(tokens, 24, "x")


def test_wikitext_is_tokenised_once_and_keeps_its_own_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["", " = Title = \n", "", " A café with ten tables . \n"] * 4
    splits = {"train": lines, "validation": lines[:8], "test": lines[:4]}
    write_wikitext(tmp_path / "hub", splits)
    monkeypatch.setenv("TREEPROP_CACHE", str(tmp_path / "cache"))
    words = ["experiment=wikitext2_small", f"data.root={tmp_path}", "data.length=8"]
    samples = data.load(config.load([*words, "data.limit=5"]))
    for name, rows in splits.items():
        raw = "".join(rows).encode()
        split = samples.split(name)
        n = 5 if name == "train" else (len(raw) - 1) // 8
        assert bytes(split.x.flatten().tolist()) == raw[: 8 * n] and len(split) == n
    (stored,) = (tmp_path / "cache").rglob("*/test-*/bytes.npy")
    assert np.load(stored, mmap_mode="r").dtype == np.int32
    monkeypatch.setattr(text, "load_split", None)  # the second time nothing is read or tokenised
    assert len(data.load(config.load([*words, "data.limit=5"])).train) == 5


def test_gpt2_tokens_of_the_real_text(hub: Path) -> None:
    """Tokens of WikiText-2 decode to the text of the split; the vocabulary is GPT-2's."""
    words = ["experiment=wikitext2_small", "data.tokenizer=gpt2", "data.length=64", "data.limit=8"]
    settings = config.load([*words, f"data.root={hub}"])
    tokenizer = text.tokenizer_of(settings.data)
    (tokens,) = tokenizer.encode([" = Robert Boulter = \n"])
    assert tokenizer.size == 50257 and tokenizer.decode(tokens) == " = Robert Boulter = \n"
    assert max(tokens) < 50257 and len(tokens) < 10


def test_embedded_text_needs_no_files_and_its_test_topics_are_not_trained_on() -> None:
    samples = data.load(config.load(TINY))
    assert samples.classes == 256 and samples.input_shape == (16,)
    x, y = samples.scoring("test", 0)
    assert x.dtype == y.dtype == torch.int64 and torch.equal(x[:, 1:], y[:, :-1])
    assert len(samples.train) > 5 * len(samples.validation) > len(samples.test) > 0


def perplexities(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "summary.json").read_text())["final"]["test"]
    return {name: score["perplexity"] for name, score in found.items()}


def test_train_reports_perplexity_of_every_path_and_evaluate_agrees(
    command: Command, tmp_path: Path
) -> None:
    result = command("train", *TINY, "steps=2", "data.limit=40", f"out={tmp_path}", "name=run")
    assert result.code == 0 and "perplexity" in result.out and "%" not in result.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for score in summary["final"]["test"].values():
        assert score["perplexity"] == math.exp(score["loss"])
    found = perplexities(tmp_path / "run")
    assert set(found) == {"spine-1", "spine-2", "spine-3", "full"}
    shown = command("evaluate", f"run={tmp_path / 'run'}").out
    for name, value in found.items():
        line = next(row for row in shown.splitlines() if row.startswith(name))
        assert f"{value:.3f}" in line
    assert (tmp_path / "run/figures/path_perplexity.png").is_file()


def test_perplexity_does_not_depend_on_the_scoring_batch() -> None:
    from dataclasses import replace

    from treeprop_ray.core.network import TreeNetwork
    from treeprop_ray.core.tree import Tree
    from treeprop_ray.inference.paths import score_network
    from treeprop_ray.models import blueprint

    settings = config.load(TINY)
    samples = data.load(settings)
    network = TreeNetwork.from_blueprint(blueprint(settings, samples), Tree(8), 1)
    found = [
        score_network(network, {"full": network.tree.chain}, replace(samples, score_batch=n)
        .batches("validation"))["full"].loss
        for n in (100, 1000)
    ]  # fmt: skip
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["data.name=digits"], "data.name=digits with model.name=gpt: one of topics, wikitext2"),
        (["model.name=vit"], "text needs model.name=gpt"),
        (["model.heads=5"], "model.heads=5: must divide model.hidden=12"),
        (["data.tokenizer=words"], "one of bytes, gpt2"),
        (["data.augment=crop_flip"], "data.augment=crop_flip: is for images"),
        (["method=bp", "engine=ray"], "use engine=local"),
        (["model.output_block=true", "model.blocks=1"], "model.blocks=1: at least 2"),
        (["data.length=100000000"], "data.length=100000000: must be at most"),
        (["data.length=500000"], "has only"),
        (["data.name=wikitext2", "data.root=/no/such"], "data.root=/no/such: no such folder"),
    ],
)
def test_mistakes_in_text_settings_are_named(
    command: Command, tmp_path: Path, words: list[str], part: str
) -> None:
    result = command("train", *TINY, *words, f"out={tmp_path}")
    assert result.code == 2 and part in result.err and len(result.error_lines) == 1
    assert not any(tmp_path.iterdir())


def test_the_exported_byte_tokenizer_gives_the_bytes_of_any_text(tmp_path: Path) -> None:
    words = "Two  spaces,\n\ttabs, \u00e4 and \u6f22"
    ours = text.Bytes()
    ours.as_hf().save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(words)["input_ids"] == list(words.encode()) == ours.encode([words])[0]
    assert again.decode(list(words.encode())) == words and len(again) == ours.size
