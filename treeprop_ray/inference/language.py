"""The language model of a run: a decoder for each of its paths, and how fast it decodes."""

from __future__ import annotations

import time
from collections.abc import Callable

from treeprop_ray import methods
from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.data.text import Tokenizer, shape_of, tokenizer_of
from treeprop_ray.errors import UserError
from treeprop_ray.inference.decoding import Continuation, Decoder
from treeprop_ray.inference.paths import parse_path
from treeprop_ray.run.folder import run_settings
from treeprop_ray.run.reading import load_network, pick_checkpoint

WARM_UP = 8  # tokens decoded before the clock starts


def open_language_model(
    run: str, checkpoint: str, data_root: str | None, storage: str = ""
) -> tuple[Callable[[str], Decoder], Tokenizer, list[str]]:
    """(makes the decoder of a path given as text, tokenizer, names of paths) of a run."""
    settings = run_settings(run)
    if settings.model.name != "gpt":
        raise UserError(f"run={run}: model.name={settings.model.name} is no language model")
    settings.data.root = data_root or settings.data.root
    point = pick_checkpoint(run, checkpoint, storage)
    network = load_network(settings, shape_of(settings.data), point)
    assert isinstance(network, TreeNetwork)
    method = methods.of(settings)
    outline = method.outline(settings, network.tree)

    def decoder(path: str) -> Decoder:
        return Decoder(network.path(parse_path(path, outline, method)))

    return decoder, tokenizer_of(settings.data), list(outline.paths)


def timed(work: Callable[[int], Continuation], tokens: int) -> tuple[Continuation, float]:
    """The continuation and tokens per second, after a warm-up."""
    work(min(WARM_UP, tokens))
    began = time.perf_counter()
    continuation = work(tokens)
    return continuation, tokens / (time.perf_counter() - began)
