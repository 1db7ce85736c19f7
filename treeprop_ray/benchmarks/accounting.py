"""bench accounting: what a step of every method costs, at equal blocks, batch and actors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from treeprop_ray.benchmarks.rehearsal import account
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.step_ray import BASE
from treeprop_ray.reporting.tables import markdown, write_table

PAGE = Path("docs/baselines.md")  # beside the folder of the results
BEGIN, END = "<!-- bench accounting -->", "<!-- end -->"


def candidates(N: int) -> list[tuple[str, list[str], int, float]]:
    """(method, settings, actors, ideal span as the paper counts)."""
    half, D = N // 2, (N - 1).bit_length()
    pieces = f"microbatches={half}"
    return [
        ("BP", ["method=bp"], 1, 2 * N),
        ("BP, recompute", ["method=bp", "recompute=true"], 1, 3 * N),
        (f"GPipe chain, {half} pieces", ["method=bp", pieces], half, _gpipe(N, half)),
        ("CFF+M", ["method=cff"], half, N + 1),
        ("TreeProp, beta = 0", ["alpha=1", "beta=0"], half, 2 * D),
        (f"TreeProp, beta = 0, {half} pieces", ["alpha=1", "beta=0", pieces], half, 2 * D),
        ("TreeProp, beta = 0.5", ["alpha=1", "beta=0.5"], half, 2 * D),
    ]


def _gpipe(N: int, stages: int) -> float:
    """Forward and backward of M = `stages` pieces over as many stages of N / stages blocks."""
    return 2 * (2 * stages - 1) * (N / stages) / stages


def run(bench: BenchSettings) -> None:
    """N = 8 and 16, Vision Transformer blocks of width 240, batch 32."""
    torch.set_num_threads(1)
    rows = [row for N in (8, 16) for row in rows_of(N)]
    table = write_table(bench.out, "bench_accounting", "What a step costs", rows, NOTES)
    print(table)
    page = Path(bench.out).parent / PAGE
    if put_into(page, rows):
        print(f"wrote the table to {page}")


def rows_of(N: int) -> list[dict[str, Any]]:
    """The methods at one N."""
    rows = []
    for name, words, actors, ideal in candidates(N):
        cost = account([*BASE, f"model.blocks={N - 1}", *words], actors)
        rows.append(
            {
                "N": N,
                "method": name,
                "actors": cost.actors,
                "trained (M)": cost.trained / 1e6,
                "deployed (M)": cost.deployed / 1e6,
                "work (blocks)": cost.work,
                "work (GFLOP)": cost.gflop,
                "critical path (blocks)": cost.span,
                "the paper's count": ideal,
                "peak per actor (MB)": cost.peak / 1e6,
                "moved (MB)": cost.moved / 1e6,
            }
        )
    return rows


NOTES = [
    "One training step of ViT blocks (width 240, six heads, MLP ratio 2, 64 tokens), batch 32, "
    "float32, AdamW, random images; N counts the head. Every row is measured on the hosts and "
    "calls of the Ray engine, run in one process (`benchmarks/rehearsal.py`).",
    "",
    "- trained, deployed: parameters in millions. TreeProp also trains N - 2 auxiliary blocks.",
    "- work: forward and backward applications of a block (or the head) to the batch, 1 each; a "
    "recomputed forward counts. CFF+M runs two views of each image, its first stage is shown. "
    "GFLOP: matrix products, counted by torch (on the CPU without those inside attention).",
    "- critical path: the longest line of such applications with the actors of the row, each "
    "doing its calls one after another, sending for free, and a piece of a batch costing its "
    "share (small pieces use a device less well). The paper's count: forward 1, backward "
    "1 per level or layer, a device for every block, the right block, the head's repetitions and "
    "the second view not counted; for the GPipe chain 2(2S - 1)N / S² with S stages and S pieces.",
    "- peak: weights, optimizer state and the largest sum of living tensors in the actor that "
    "needs most (tensors, not the process; torch's own workspace is not seen).",
    "- moved: bytes that actors send each other.",
]


def put_into(page: Path, rows: Sequence[dict[str, Any]]) -> bool:
    """Replace the table between the page's marks."""
    if not page.is_file() or BEGIN not in page.read_text():
        return False
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{markdown(rows)}\n{END}{after}")
    return True
