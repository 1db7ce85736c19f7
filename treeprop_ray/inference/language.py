"""The language model of a run: a decoder for each of its paths, what it says, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from treeprop_ray import methods
from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.data.text import Tokenizer, shape_of, tokenizer_of
from treeprop_ray.errors import UserError
from treeprop_ray.inference.decoding import Continuation, Decoder, Sampler, decode, speculate
from treeprop_ray.inference.drafting import decode_auto
from treeprop_ray.inference.paths import as_path_text, parse_path
from treeprop_ray.inference.settings import GenerateSettings
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


def continued(s: GenerateSettings) -> tuple[str, str]:
    """The prompt with its continuation, and a line about speed and drafts."""
    torch.set_num_threads(run_settings(s.run).threads)  # as in training; more wait for each other
    decoder, tokenizer, names = open_language_model(s.run, s.checkpoint, s.data_root, s.storage)
    path, draft = as_path_text(s.path), as_path_text(s.draft)
    chain, sampler = decoder(path), Sampler(s.temperature, s.top_k)
    drafters = [n for n in names if n not in ("full", path)] if draft == "auto" else [draft]
    shorts = {name: decoder(name) for name in drafters if name}
    (prompt,) = tokenizer.encode([s.prompt])

    def with_drafts(count: int) -> Continuation:
        if draft == "auto":
            return decode_auto(chain, shorts, prompt, count, sampler, s.seed)
        return speculate(chain, shorts[draft], prompt, count, s.ahead, sampler, s.seed)

    said, speed = timed(lambda n: decode(chain, prompt, n, sampler, s.seed), s.tokens)
    about = f"plain: {speed:.0f} tokens/s"
    if draft:
        plain = said
        said, faster = timed(with_drafts, s.tokens)
        chosen = f" ({', then '.join(said.drafters)})" if said.drafters else ""  # by draft=auto
        about += (
            f"; drafts by {draft}{chosen}: {faster:.0f} tokens/s, "
            f"{faster / speed:.2f} times plain, "
            f"{100 * said.accepted / max(1, said.drafted):.1f} % of {said.drafted} drafts accepted"
        )
        if s.temperature == 0:
            about += f", same text as plain: {'yes' if said.tokens == plain.tokens else 'no'}"
    length = f"{len(prompt)} + {len(said.tokens)} tokens"
    return s.prompt + tokenizer.decode(said.tokens), f"[{length}; {about}]"
