"""Text as windows of tokens: CPython's help topics (embedded) and WikiText from the hub layout.

A text is one long row of tokens, tokenised once into a memory-mapped array and cut into windows of
`data.length` tokens without overlap. The labels are the tokens one place later; what is left over
at the end (less than a window) is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from treeprop_ray.core.network import Shape
from treeprop_ray.data.cache import cached
from treeprop_ray.data.hub import cache_folder, find_root, load_split, prepare_offline
from treeprop_ray.data.sets import DataSet, Split
from treeprop_ray.errors import UserError, first_line

if TYPE_CHECKING:
    from treeprop_ray.config import Data

SCORE_TOKENS = 8192  # tokens that are scored at the same time
ROWS = 10_000  # lines that are tokenised at the same time
GPT2 = "openai-community/gpt2"
WIKITEXT = "Salesforce/wikitext"


class Tokenizer(Protocol):
    """Text to tokens and back."""

    size: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of every text."""

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens."""

    def as_hf(self) -> Any:
        """The same as a tokenizer of Hugging Face, to be written beside a model."""


class Bytes:
    """A token is a byte of UTF-8."""

    size = 256

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def as_hf(self) -> Any:
        prepare_offline()
        from tokenizers import Tokenizer as Rust
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        plain = Rust(models.BPE({letter: b for b, letter in bytes_to_unicode().items()}, []))
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        plain.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=plain)


class GPT2Bytes:
    """GPT-2's byte-level BPE with 50257 tokens, from transformers."""

    size = 50257

    def __init__(self, root: str | None) -> None:

        prepare_offline()
        from transformers import GPT2TokenizerFast

        logging.getLogger("transformers").setLevel(logging.ERROR)
        found = find_root(root)
        local = found / GPT2 if found else None
        source = str(local) if local and local.is_dir() else GPT2
        try:
            self.bpe = GPT2TokenizerFast.from_pretrained(source)
        except Exception as e:
            raise UserError(
                f"data.tokenizer=gpt2: {GPT2} is not under data.root (or TREEPROP_DATA), and the "
                f"hub gave: {first_line(e)}"
            ) from e
        if len(self.bpe) != self.size:
            raise UserError(
                f"data.tokenizer=gpt2: {source} has {len(self.bpe)} tokens, must have {self.size}"
            )

    def encode(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self.bpe(texts, verbose=False)["input_ids"]
        return found

    def decode(self, tokens: list[int]) -> str:
        return str(self.bpe.decode(tokens))

    def as_hf(self) -> Any:
        return self.bpe


def tokenizer_of(data: Data) -> Tokenizer:
    """The tokenizer that the settings name."""
    return Bytes() if data.tokenizer == "bytes" else GPT2Bytes(data.root)


def tokenised(path: Path, data: Data, texts: Callable[[], Iterable[list[str]]]) -> Tensor:
    """The tokens of groups of texts as a memory-mapped int32 array, made on first use."""

    def make() -> Any:
        tokenizer = tokenizer_of(data)
        rows = [np.asarray(t, np.int32) for group in texts() for t in tokenizer.encode(group) if t]
        return np.concatenate(rows)

    return torch.from_numpy(cached(path, make))


def windows(tokens: Tensor, length: int, what: str) -> Split:
    """Windows of `length` tokens and, one place later, their labels; views of one array."""
    n = (len(tokens) - 1) // length
    if n < 1:
        raise UserError(f"data.length={length}: {what} has only {len(tokens)} tokens")
    x, y = tokens[: n * length], tokens[1 : n * length + 1]
    return Split(x.view(n, length), y.view(n, length))


def shape_of(data: Data, dtype: torch.dtype = torch.float32) -> Shape:
    """What a model must know of a text, without reading it."""
    size = Bytes.size if data.tokenizer == "bytes" else GPT2Bytes.size
    return Shape((data.length,), size, dtype)


def data_set(name: str, train: Split, validation: Split, test: Split, data: Data) -> DataSet:
    """Windows of text; scored `SCORE_TOKENS` tokens at a time."""
    size, score = shape_of(data).classes, max(1, SCORE_TOKENS // data.length)
    return DataSet(name, train, validation, test, size, Tensor.long, score_batch=score)


def topics(data: Data) -> DataSet:
    """Python's own help texts, `pydoc_data.topics`, in alphabetic order; every tenth topic is test.

    Topics repeat each other's passages, and the texts differ between versions of Python: figures
    compare methods, not versions.
    """
    from pydoc_data.topics import topics as texts

    tokenizer = tokenizer_of(data)
    parts: dict[str, list[int]] = {"train": [], "test": []}
    for i, key in enumerate(sorted(texts)):
        (tokens,) = tokenizer.encode([texts[key]])
        parts["test" if i % 10 == 9 else "train"] += tokens
    train, test = (
        windows(torch.tensor(parts[split], dtype=torch.int32), data.length, f"topics, {split}")
        for split in ("train", "test")
    )
    return data_set("topics", train, test, test, data)


def wikitext(config: str, name: str, data: Data) -> DataSet:
    """WikiText with its own validation and test splits, from `Salesforce/wikitext`."""

    def split(which: str) -> Split:
        def texts() -> Iterator[list[str]]:
            rows = load_split(WIKITEXT, which, data.root, config)
            for at in range(0, len(rows), ROWS):
                yield list(rows[at : at + ROWS]["text"])

        folder = cache_folder(f"{WIKITEXT}/{config}", which, data.root)
        tokens = tokenised(folder / f"{data.tokenizer}.npy", data, texts)
        return windows(tokens, data.length, f"{name}, {which}")

    return data_set(name, split("train"), split("validation"), split("test"), data)


# Sets that bring their own validation split.
OWN_VALIDATION = ("wikitext2", "wikitext103")

SETS: dict[str, Callable[[Data], DataSet]] = {
    "topics": topics,
    "wikitext2": partial(wikitext, "wikitext-2-v1", "wikitext2"),
    "wikitext103": partial(wikitext, "wikitext-103-v1", "wikitext103"),
}
