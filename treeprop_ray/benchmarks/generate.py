"""bench generate: self-speculative decoding against plain decoding of trained runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treeprop_ray import methods
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import in_turn, ratio
from treeprop_ray.errors import UserError
from treeprop_ray.inference.decoding import Continuation, Sampler, decode, speculate
from treeprop_ray.inference.drafting import decode_auto
from treeprop_ray.inference.language import open_language_model
from treeprop_ray.reporting.tables import write_table
from treeprop_ray.run.folder import run_settings

PROMPT = "The following "
AHEAD = (2, 4, 8)
PARTS = (1, 3, 10)  # the whole text, and what parts of it draft=auto is timed in as well
SAMPLERS = (("greedy", 0.0), ("temperature 0.8", 0.8))


@dataclass(frozen=True)
class Candidate:
    """A way to decode with a run; `draft`: a path, auto, or empty for none."""

    kind: str
    temperature: float
    draft: str
    ahead: int
    count: int  # of tokens


def run(bench: BenchSettings) -> None:
    """Every spine path drafts 2, 4 or 8 tokens for the full chain, or draft=auto, which is timed in
    shorter texts too; two samplers."""
    torch.set_num_threads(1)
    folders = bench.run if isinstance(bench.run, list) else [bench.run]
    count, rows, notes = 10 * bench.steps, [], []
    for folder in map(str, folders):
        rows += rows_of(folder, count, bench.rounds)
        settings = run_settings(folder)
        model, name = settings.model, Path(folder).name
        notes.append(
            f"Run `{name}`: `{settings.experiment}`, {model.blocks} blocks of width "
            f"{model.hidden}, objective={settings.objective}, epochs={settings.epochs}.  "
        )
    notes.append(
        f"Texts after {PROMPT!r}, one sequence, one torch thread, key-value cache in all. "
        f"Candidates of a run timed in turn, {bench.rounds} rounds; medians. auto measures "
        "acceptance and times while it decodes (inference/drafting.py), which is part of its time; "
        "the column shows what it picked in the last round."
    )
    print(write_table(bench.out, "bench_generate", "Self-speculative decoding", rows, notes))


def rows_of(folder: str, count: int, rounds: int) -> list[dict[str, Any]]:
    """A row for every candidate of a run."""
    method = methods.of(run_settings(folder))
    if not method.short_paths:
        raise UserError(f"run={folder}: method={method.name} has no short paths to draft")
    decoder, tokenizer, names = open_language_model(folder, "last", None)
    (prompt,) = tokenizer.encode([PROMPT])
    chain, spines = decoder("full"), [n for n in names if n != "full"]
    shorts = {name: decoder(name) for name in spines}
    texts: dict[Candidate, Continuation] = {}

    def work(c: Candidate) -> Callable[[], None]:
        sampler = Sampler(c.temperature)

        def go() -> None:
            if c.draft == "auto":
                texts[c] = decode_auto(chain, shorts, prompt, c.count, sampler, 1)
            elif c.draft:
                texts[c] = speculate(chain, shorts[c.draft], prompt, c.count, c.ahead, sampler, 1)
            else:
                texts[c] = decode(chain, prompt, c.count, sampler, 1)

        return go

    fixed = [(s, n) for s in spines for n in AHEAD]
    candidates = [
        Candidate(kind, temperature, draft, ahead, length)
        for kind, temperature in SAMPLERS
        for length in sorted({max(1, count // part) for part in PARTS})
        for draft, ahead in (("", 0), *(fixed if length == count else ()), ("auto", 0))
    ]
    seconds = in_turn({str(c): work(c) for c in candidates}, rounds)
    rows: list[dict[str, Any]] = []
    for c in candidates:
        plain, text = Candidate(c.kind, c.temperature, "", 0, c.count), texts[c]
        same = "yes" if text.tokens == texts[plain].tokens else "no"
        picked = ", then ".join(text.drafters) or "none"
        rows.append(
            {
                "run": Path(folder).name,
                "decoding": c.kind,
                "tokens": c.count,
                "draft": c.draft or "-",
                "ahead": picked if c.draft == "auto" else str(c.ahead or "-"),
                "tokens/s": round(c.count / statistics.median(seconds[str(c)])),
                "speed-up over plain": 1 / ratio(seconds, str(c), str(plain)),
                "drafts accepted (%)": 100 * text.accepted / text.drafted if text.drafted else "-",
                "same tokens as plain": same if c.kind == "greedy" else "-",
            }
        )
    return rows
