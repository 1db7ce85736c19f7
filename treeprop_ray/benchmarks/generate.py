"""bench generate: self-speculative decoding against plain decoding of one trained run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from treeprop_ray import methods
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import in_turn, ratio
from treeprop_ray.errors import UserError
from treeprop_ray.inference.decoding import Continuation, Sampler, decode, speculate
from treeprop_ray.inference.language import open_language_model
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.run.folder import run_settings

PROMPT = "The following "
AHEAD = (2, 4, 8)


def run(bench: BenchSettings) -> None:
    """Every spine path drafts 2, 4 or 8 tokens for the full chain; greedy and sampled."""
    settings = run_settings(bench.run)
    method = methods.of(settings)
    if not method.short_paths:
        raise UserError(f"run={bench.run}: method={method.name} has no short paths to draft")
    torch.set_num_threads(1)
    decoder, tokenizer, names = open_language_model(bench.run, "last", None)
    (prompt,) = tokenizer.encode([PROMPT])
    chain, count = decoder("full"), 10 * bench.steps
    work: dict[str, Callable[[], None]] = {}
    texts: dict[str, Continuation] = {}
    labels: dict[str, tuple[str, str, str]] = {}

    def candidate(kind: str, temperature: float, draft: str, ahead: int) -> None:
        sampler = Sampler(temperature)
        short = decoder(draft) if draft else None

        def go() -> None:
            if short is None:
                texts[name] = decode(chain, prompt, count, sampler, 1)
            else:
                texts[name] = speculate(chain, short, prompt, count, ahead, sampler, 1)

        name = f"{kind} {draft} {ahead}"
        work[name], labels[name] = go, (kind, draft or "-", str(ahead) if draft else "-")

    for kind, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8)):
        candidate(kind, temperature, "", 0)
        for draft in (n for n in names if n != "full"):
            for ahead in AHEAD:
                candidate(kind, temperature, draft, ahead)
    seconds = in_turn(work, bench.rounds)
    rows: list[dict[str, Any]] = []
    for name, (kind, draft, drafted) in labels.items():
        plain, c = f"{kind}  0", texts[name]
        rows.append(
            {
                "decoding": kind,
                "draft": draft,
                "ahead": drafted,
                "tokens/s": round(count / statistics.median(seconds[name])),
                "speed-up over plain": 1 / ratio(seconds, name, plain),
                "drafts accepted (%)": 100 * c.accepted / c.drafted if c.drafted else "-",
                "same tokens as plain": (
                    "-" if kind != "greedy" else "yes" if c.tokens == texts[plain].tokens else "no"
                ),
            }
        )
    notes = [
        f"Run `{settings.experiment}` ({settings.model.blocks} blocks of width "
        f"{settings.model.hidden}), {count} tokens after {PROMPT!r}, one sequence, one torch "
        f"thread, key-value cache in both. Candidates timed in turn, {bench.rounds} rounds; "
        "medians.",
    ]
    print(write_table(bench.out, "bench_generate", "Self-speculative decoding", rows, notes))
