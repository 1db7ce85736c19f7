"""Continue a text with a trained language model.

    python -m treeprop_ray.generate run=results/runs/<name> prompt="The list" path=full
    python -m treeprop_ray.generate run=results/runs/<name> prompt="The list" draft=auto
    python -m treeprop_ray.generate run=results/runs/<name> prompt="The list" draft=spine-1 ahead=4

With draft= a short path drafts tokens and the path verifies several at once (self-speculative
decoding): the text has the same distribution as without drafts, with temperature=0 it is the same
text. draft=auto measures acceptance and times while it decodes, picks path and length, and drafts
only where that is faster (so a sampled text may differ from run to run, with the same seed). Both
are timed one after the other, and the acceptance rate of the drafts is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeprop_ray import config
from treeprop_ray.config import cli, opt
from treeprop_ray.errors import UserError


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


def load(words: Sequence[str]) -> GenerateSettings:
    """Settings from command-line words; text is taken as it stands, not as YAML."""
    words = [
        f"prompt={json.dumps(w[7:], ensure_ascii=False)}" if w.startswith("prompt=") else w
        for w in words
    ]
    settings: GenerateSettings = config.merge(GenerateSettings, ("", config.parse_overrides(words)))
    if not settings.prompt:
        raise UserError("prompt= : at least one character")
    return settings


def run(settings: GenerateSettings) -> None:
    """The generate command."""
    import torch

    from treeprop_ray.inference.decoding import Continuation, Sampler, decode, speculate
    from treeprop_ray.inference.drafting import decode_auto
    from treeprop_ray.inference.language import open_language_model, timed
    from treeprop_ray.inference.paths import as_path_text
    from treeprop_ray.run.folder import run_settings

    s = settings
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

    plain, speed = timed(lambda n: decode(chain, prompt, n, sampler, s.seed), s.tokens)
    about = f"plain: {speed:.0f} tokens/s"
    if draft:
        drafted, faster = timed(with_drafts, s.tokens)
        rate = drafted.accepted / max(1, drafted.drafted)
        about += (
            f"; drafts by {draft}{chosen(drafted.drafters)}: {faster:.0f} tokens/s, "
            f"{faster / speed:.2f} times plain, {100 * rate:.1f} % of {drafted.drafted} "
            "drafts accepted"
        )
        if s.temperature == 0:
            about += f", same text as plain: {'yes' if drafted.tokens == plain.tokens else 'no'}"
        plain = drafted
    print(s.prompt + tokenizer.decode(plain.tokens))
    print(f"[{len(prompt)} + {len(plain.tokens)} tokens; {about}]", file=sys.stderr)


def chosen(drafters: Sequence[str]) -> str:
    """What draft=auto has picked, in brackets."""
    return f" ({', then '.join(drafters)})" if drafters else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.generate`."""
    return cli.main(__doc__ or "", GenerateSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
