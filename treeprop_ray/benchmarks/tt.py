"""bench tt: a step of TreeProp-TT against a step of BPTT on the same cell, D = 1 … 10."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from treeprop_ray import config
from treeprop_ray.benchmarks.random_data import random_job, random_sequences
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.core.bptt import cell_by_cell
from treeprop_ray.data import Batches
from treeprop_ray.engine import LocalEngine
from treeprop_ray.hosts.time import BpttHost
from treeprop_ray.reporting.tables import write_table

REGIMES = [("latency", 64, 1), ("latency", 64, 8), ("compute", 128, 128)]  # name, hidden, batch
SWEEPS = (0, 4)
BASE = ["experiment=smnist_gru", "precision=float32", "device=cpu"]
SYMBOLS = 2**13  # the tree goes over more than these in pieces, so that a depth stays in the cache
SECONDS = 0.25  # a timing has as many steps as BPTT does in this time, at most bench.steps


class OneBatch(Batches):
    """The same batch at every step, already made: the step is timed alone."""

    def __call__(self, step: int, view: int = 0) -> tuple[Tensor, Tensor]:
        whole = self.data.read("train", slice(None))
        return whole.x, whole.y


def measure(bench: BenchSettings, regime: str, hidden: int, batch: int, D: int) -> dict[str, Any]:
    """One row: BPTT, torch.nn.GRU and the tree for every K, timed in turn."""
    words = [*BASE, f"model.hidden={hidden}", f"batch={batch}", f"time.depth={D}"]
    chosen = {"bptt": ["method=bptt"], "plain": ["method=bptt"], "fused": ["method=bptt_fused"]}
    pieces = f"microbatches={max(1, (batch << D) // SYMBOLS)}"
    chosen |= {f"K={K}": ["method=tree", f"time.sweeps={K}", pieces] for K in SWEEPS}
    data, clock = random_sequences(batch, D), itertools.count()
    batches = partial(OneBatch, data, batch, 1)
    engines = {}
    for name, more in chosen.items():
        job = random_job(config.load([*words, *more]), data)
        engines[name] = LocalEngine(replace(job, batches=batches))
    plain = engines["plain"].host
    assert isinstance(plain, BpttHost)
    plain.bptt.roll = cell_by_cell(plain.parts["f0"])
    once = in_turn({"bptt": steps_of(engines["bptt"], 1, clock)}, 3)["bptt"]
    count = max(1, min(bench.steps, int(SECONDS / min(once))))
    rounds = bench.rounds if regime == "latency" else max(3, bench.rounds // 3)
    seconds = in_turn({name: steps_of(e, count, clock) for name, e in engines.items()}, rounds)
    row: dict[str, Any] = {"regime": regime, "H": hidden, "batch": batch, "D": D, "N": 2**D}
    for name in engines:
        row[f"{name} ms"] = 1000 * statistics.median(seconds[name]) / count
    for K in SWEEPS:
        tree = f"K={K}"
        row[f"bptt / tree, {tree}"] = 1 / ratio(seconds, tree, "bptt")
        row[f"plain / tree, {tree}"] = 1 / ratio(seconds, tree, "plain")
        row[f"fused / tree, {tree}"] = 1 / ratio(seconds, tree, "fused")
        row[f"tree / bptt, {tree}"] = ratio(seconds, tree, "bptt")
        row[f"work 2+K, {tree}"] = 2 + K
    return row


def run(bench: BenchSettings) -> None:
    """GRU, one torch thread; the whole step: forward, backward, clipping, AdamW."""
    rows = []
    for regime, hidden, batch in REGIMES:
        for D in range(1, bench.depth + 1):
            rows.append(measure(bench, regime, hidden, batch, D))
            shown = ", ".join(f"K = {K}: {rows[-1][f'bptt / tree, K={K}']:.2f}x" for K in SWEEPS)
            print(f"{regime}, batch {batch}, D = {D}: {shown}", flush=True)
    notes = [
        "A training step of a GRU on MNIST-shaped random sequences of N = 2**D symbols, everything "
        "but the making of the batch: forward, backward, gradient norm and clipping, AdamW. `bptt` "
        "is the same cell unrolled by autograd, with its input products for all steps in one call "
        "as in the tree; `plain` calls the whole cell at every step, as the textbook loop does; "
        "`fused` is torch.nn.GRU. The tree goes back through its two applications per depth by "
        "written-out formulas, BPTT by autograd. BPTT flushes denormal numbers to zero, as in "
        "`train` (else its vanishing gradients make it several times slower on a CPU from D = 8 "
        f"on). The tree takes a batch in pieces (microbatches=) of at most {SYMBOLS:,} symbols, so "
        "that a depth stays in the cache; BPTT touches one symbol of every sample at a time "
        "anyway. For symbols of few numbers the tree computes the input weights' gradient with the "
        "narrow factor first, autograd does not: an advantage of the tree in large batches. "
        "float32, one torch thread; candidates are timed "
        f"in turn, {bench.rounds} rounds (a third of them when compute-bound), and every ratio is "
        "the median of the rounds' ratios.",
        "",
        "`bptt / tree` above 1: TreeProp-TT is faster. Latency-bound rows show what a device with "
        "room for a whole depth at once would see (ideal span: 2 N / (1 + D + K)). Compute-bound "
        "rows show that on one core the tree pays for its extra work: `tree / bptt` stands beside "
        "the work ratio 2 + K, which counts every sweep in full; the first sweep is what depth 0 "
        "has computed already, and all sweeps but the last have no backward.",
        "",
        "![speed-up over depth](bench_tt.png)",
    ]
    print(write_table(bench.out, "bench_tt", "TreeProp through time against BPTT", rows, notes))
    figure(rows, Path(bench.out) / "bench_tt.png")


def figure(rows: Sequence[dict[str, Any]], target: Path) -> None:
    """Speed-up over D: one panel per regime, a line per K and baseline."""
    panels = list(dict.fromkeys((r["regime"], r["H"], r["batch"]) for r in rows))
    fig = Figure(figsize=(4.2 * len(panels), 3.6))
    axes = fig.subplots(1, len(panels), squeeze=False)
    for ax, panel in zip(axes[0], panels, strict=True):
        mine = [r for r in rows if (r["regime"], r["H"], r["batch"]) == panel]
        for K, colour in zip(SWEEPS, ("C0", "C1"), strict=True):
            for base, style in (("bptt", "-"), ("plain", "--"), ("fused", ":")):
                values = [r[f"{base} / tree, K={K}"] for r in mine]
                label = f"over {base}, K = {K}"
                ax.plot(
                    [r["D"] for r in mine], values, style, color=colour, marker=".", label=label
                )
        ax.axhline(1, color="0.6", lw=0.8)
        ax.set(xlabel="depth D (N = 2**D steps)", ylabel="speed-up of a training step")
        ax.set(yscale="log", title=f"{panel[0]}-bound: H = {panel[1]}, batch {panel[2]}")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(target, dpi=120)
