"""Settings of the commands evaluate, export and generate. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treeprop_ray.config import opt


@dataclass
class EvaluateSettings:
    """Settings of the evaluate command."""

    run: str = opt("", "run folder, e.g. results/runs/<name>")
    checkpoint: str = opt("last", "last, best or a step number")
    mode: str = opt(
        "paths", "score whole paths, or let samples stop early", choices=["paths", "adaptive"]
    )
    blocks: Any = opt(
        None, "adaptive: mean blocks a sample may cost, a number or a list; default: a range"
    )
    threshold: Any = opt(
        None,
        "adaptive: confidence at which a sample stops, the same at all exits, in place of those "
        "that validation chose; a number or a list",
    )
    out: str = opt("", "adaptive: folder for table and figure, e.g. results/local; default: none")
    path: Any = opt("all", "all, full, spine-k, or indices such as [0,4,6,7,8]")
    split: str = opt("test", "which split", choices=["train", "validation", "test"])
    data_root: str | None = opt(None, "hub folder, if it has moved since the run")
    storage: str = opt("", "where the checkpoints lie, if config.yaml of the run names a URL")


@dataclass
class ExportSettings:
    """Settings of the export command."""

    run: str = opt("", "run folder, e.g. results/runs/<name>")
    checkpoint: str = opt("last", "last, best or a step number")
    path: Any = opt(
        "full", "full, spine-k, indices such as [0,4,6,7,8], or adaptive: samples stop early"
    )
    format: str = opt(
        "plain", "a PyTorch program, or a model of Hugging Face's", choices=["plain", "hf"]
    )
    to: str = opt("", "target folder; default: <run>/export/<path>")
    data_root: str | None = opt(None, "hub folder, if it has moved since the run")
    storage: str = opt("", "where the checkpoints lie, if config.yaml of the run names a URL")


@dataclass
class GenerateSettings:
    """Settings of the generate command."""

    run: str = opt("", "run folder of a language model, e.g. results/runs/<name>")
    checkpoint: str = opt("last", "last, best or a step number")
    prompt: str = opt("The ", "text to continue")
    path: Any = opt("full", "full, spine-k, or indices such as [0,4,6,7,8]")
    draft: Any = opt(
        "",
        "short path that drafts for the path; auto: the fastest one, or none; empty: no drafts",
    )
    ahead: int = opt(
        4, "tokens drafted before the path looks at them (not with draft=auto)", low=1, high=1024
    )
    tokens: int = opt(200, "how many tokens to add", low=1, high=10**6)
    temperature: float = opt(0.8, "0 takes the most probable token", low=0, high=100)
    top_k: int = opt(0, "draw from so many most probable tokens only; 0 = all", low=0)
    seed: int = opt(1, "seed of the draws", low=0, high=2**31 - 1)
    data_root: str | None = opt(None, "hub folder with GPT-2's tokenizer, if it has moved")
    storage: str = opt("", "where the checkpoints lie, if config.yaml of the run names a URL")
