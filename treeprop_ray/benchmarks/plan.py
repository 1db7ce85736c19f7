"""bench plan: step time and memory on clusters that are not here, and how far to trust the figures.

One table prices GPT-2 large and longer chains of its blocks (schedule/planner.py); none of it was
measured. The other puts the model beside what was measured on this machine: the committed tables of
`bench span` and `bench step engine=ray`.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from treeprop_ray.benchmarks import plan_checks, plan_gpt2
from treeprop_ray.benchmarks.emulated import HOSTS
from treeprop_ray.benchmarks.plan_checks import line
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.span import as_the_paper, chain_calls, tree_calls
from treeprop_ray.config import LOCAL, PUBLISHED
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule import planner
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import pack
from treeprop_ray.schedule.planner import (
    COPIES,
    ONE_F_ONE_B,
    PIECES,
    TREE,
    ZERO_BUBBLE,
    Candidate,
    Fleet,
)
from treeprop_ray.schedule.pricing import (
    ETHERNET,
    FREE,
    NVLINK,
    PCIE,
    RUNTIMES,
    SHARED,
    SUBMIT,
    Link,
    Runtime,
    price,
)
from treeprop_ray.schedule.tree import one_step
from treeprop_ray.schedule.workload import Device, Network, Workload

# Assumptions, not measurements: an A100 of 80 GB at 40 % of its bf16 peak.
DEVICE, MEMORY = Device(), 80e9
LINKS = (NVLINK, PCIE, ETHERNET)
SIZES = {"GPT-2 large": 36, "64 blocks": 64, "256 blocks": 256, "1024 blocks": 1024}
DEVICES = (8, 64, 512)
MOST_COPIES = 16


def run(bench: BenchSettings) -> None:
    """Print and write both tables."""
    checks, hop = check_span(read(bench.out, "bench_span"))
    checks += check_step(read(bench.out, "bench_step_ray"), hop)
    checks += plan_checks.replicas(rows_if_there(bench.out, "bench_replicas"), hop)
    checks += plan_checks.pipelines(rows_if_there(bench.out, "bench_pipeline"), hop)
    off = f"Median factor between predicted and measured: {error_of(checks):.2f}."
    table = write_table(
        bench.out, "bench_plan_check", "Cost model against measured", checks, [*CHECK, "", off]
    )
    print(f"{table}\n{off}")
    ray = Runtime(hop, SUBMIT)
    large, said = plan_gpt2.rows_and_notes(ray, checks)
    print(write_table(bench.out, plan_gpt2.NAME, plan_gpt2.TITLE, large, said))
    rows = []
    for name, N in SIZES.items():
        for count in DEVICES:
            for link in links(count):
                fleet = Fleet((1.0,) * count, link, ray, MEMORY)
                rows.append(row_of(name, Network(N).on(DEVICE), fleet))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    print(write_table(bench.out, "bench_plan", "Predicted step times", rows, notes(hop)))


def links(count: int) -> Sequence[Link]:
    """Eight devices may sit in one machine; more are joined by the network."""
    return LINKS if count <= 8 else LINKS[-1:]


def row_of(name: str, work: Workload, fleet: Fleet) -> dict[str, Any]:
    """One cluster: the three methods, each with its best number of micro-batches."""
    bare, quick = replace(fleet, ray=FREE), replace(fleet, ray=RUNTIMES["stream"])
    tree = planner.best([planner.tree(work, fleet, 1, m) for m in PIECES[TREE]])
    alone = planner.best([planner.tree(work, bare, 1, m) for m in PIECES[TREE]])
    streamed = planner.best([planner.tree(work, quick, 1, m) for m in PIECES[TREE]])
    copies = best_copies(planner.tree, work, quick, PIECES[TREE])
    chain = planner.best([planner.pipeline(work, fleet, 1, m) for m in PIECES[ONE_F_ONE_B]])
    zero_bubble = partial(planner.pipeline, way=ZERO_BUBBLE)
    columns = {
        "TreeProp": tree,
        "trees": best_copies(planner.tree, work, fleet, PIECES[TREE]),
        "GPipe": chain,
        "pipelines": best_copies(planner.pipeline, work, fleet, PIECES[ONE_F_ONE_B]),
        "zero bubble": best_copies(zero_bubble, work, fleet, PIECES[ZERO_BUBBLE]),
        "DP": planner.data_parallel(work, fleet),
    }
    fitting = {n: c.seconds for n, c in columns.items() if c.memory <= MEMORY}
    return {
        "network": name,
        "GPUs": len(fleet),
        "used": f"{tree.hosts} / {chain.hosts} / {columns['DP'].copies}",
        "link": fleet.link.name,
        "TreeProp (ms)": shown(tree),
        "stream (ms)": shown(streamed),
        "without Ray": round(1000 * alone.seconds),
        "trees x R (ms)": with_copies(columns["trees"]),
        "trees x R, stream (ms)": with_copies(copies),
        "GPipe (ms)": shown(chain),
        "GPipe x R (ms)": with_copies(columns["pipelines"]),
        "zero bubble x R (ms)": with_copies(columns["zero bubble"]),
        "DP (ms)": round(1000 * columns["DP"].seconds),
        "GB per GPU": " / ".join(f"{c.memory / 1e9:.0f}" for c in columns.values()),
        "GB per wave": tree.step.wave / 1e9,
        "fastest that fits": min(fitting, key=lambda n: fitting[n]) if fitting else "none",
    }


def best_copies(
    way: Callable[..., Candidate], work: Workload, fleet: Fleet, pieces: Sequence[int]
) -> Candidate:
    """The fastest number of copies and of micro-batches that fits, or the fastest."""
    counts = [R for R in COPIES if min(len(fleet), work.batch, MOST_COPIES) >= R]
    made = [way(work, fleet, R, m) for R in counts for m in pieces if R * m <= work.batch]
    return planner.best(made, fleet.memory)


def shown(c: Candidate) -> str:
    """Milliseconds and micro-batches; a star where the driver is the limit."""
    star = "*" if c.step.driver >= c.step.path else ""
    return f"{1000 * c.seconds:.0f}{star} (m={c.pieces})"


def with_copies(c: Candidate) -> str:
    """The same, with the number of copies."""
    return f"{shown(c)[:-1]}, R={c.copies})"


def notes(hop: float) -> list[str]:
    """What the table assumes."""
    net, gpu, stream = Network(36), DEVICE, RUNTIMES["stream"].hop
    rates = ", ".join(f"{l.name} {l.bandwidth / 1e9:.0f} GB/s" for l in LINKS)
    return [
        f"""**Nothing in this table was measured.** Network: Transformer blocks of GPT-2 large
(width {net.width}, {net.tokens} tokens, vocabulary {net.vocabulary}), the last with the
language-model head; batch {net.batch} sequences, the same for all methods. GPU:
{gpu.peak / 1e12:.0f} TFLOP/s (bf16) at {100 * gpu.share:.0f} %, less for pieces of few tokens,
with {MEMORY / 1e9:.0f} GB. Links: {rates}. Ray, as on this machine: {1000 * hop:.1f} ms from call
to call (fitted, see bench_plan_check.md) and {1000 * SUBMIT:.2f} ms of the driver per call, which
is transport=store; `stream`: {1000 * stream:g} ms from call to call and no driver. GPipe and DP are
priced without Ray. `GB per GPU` and `fastest that fits` are those of store's columns.""",
        "",
        f"""TreeProp: beta = 0, packed layout, objective=node. GPipe: stages of equal length, one
forward one backward; zero bubble: a formula on paper, faster than torch's own was here
(bench_plan_check.md). DP: data-parallel backpropagation, ring all-reduce, half of it hidden; at
most one replica per sequence. x R: R copies of the tree (`replicas=R`) or of the pipeline, each
with its share of the batch, none of the exchange of gradients hidden; the fastest R that fits.
`used`: GPUs that TreeProp (at most one per line, N / 2), GPipe (at most N) and DP can use. m:
micro-batches (of a copy), the best of those tried. A star: the driver is the limit. `GB per GPU`:
the fullest one, in the order of the columns; more than {MEMORY / 1e9:.0f} does not fit. `GB per
wave`: the most that all actors of one tree together send after one level.""",
    ]


CHECK = [
    "Predicted: the cost model with blocks that sleep (span, replicas) or whose price is that of "
    "one process (ViT). Ray's time from call to call is fitted to one row and used in all others; "
    f"with stream it is {1000 * RUNTIMES['stream'].hop:g} ms, without the driver. "
    "Measured: bench_span.csv, bench_step_ray.csv, bench_replicas.csv (copies of trees, emulated) "
    "and bench_pipeline.csv (torch's own 1F1B and our chain of actors) in this folder. The model "
    "knows no noise, no sharing of cores and no update, so with long blocks, many processes on two "
    "cores and real pipelines it errs on the fast side; where adjoints are sent before the "
    "gradients of weights, which it does not know either, on the slow side.",
]

# -- the model against what was measured here ------------------------------------------------------


def table_of(out: str, name: str) -> Path:
    """A table that another benchmark wrote: one's own, else the project's."""
    own, published = (Path(folder) / f"{name}.csv" for folder in (out, PUBLISHED))
    return own if own.is_file() or out != LOCAL else published


def read(out: str, name: str) -> list[dict[str, str]]:
    """Its rows."""
    path = table_of(out, name)
    if not path.is_file():
        how = "span" if name.endswith("span") else "step engine=ray"
        raise UserError(f"out={out}: no {path.name} to check the model against; run bench {how}")
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def rows_if_there(out: str, name: str) -> list[dict[str, str]]:
    """Rows of a table that need not be there."""
    return read(out, name) if table_of(out, name).is_file() else []


def emulated(N: int, t: float, hop: float, chain: bool) -> float:
    """A step of `bench span`, which sleeps t for all nodes of a call at once."""
    calls = chain_calls(HOSTS) if chain else tree_calls(N)
    cost = partial(as_the_paper, t, N // HOSTS)
    return price(calls, HOSTS, cost, lambda _: 4.0, LINKS[-1], Runtime(hop, SUBMIT)).seconds


def check_span(measured: Sequence[Mapping[str, str]]) -> tuple[list[dict[str, Any]], float]:
    """Rows for every run of bench span; Ray's hop is fitted to one of them, N = 8 at t = 20 ms."""
    given = []
    for r in measured:
        few = r.get("chain of few stages (ms)", r["chain (ms)"])  # its name in tables of before
        t, tree, chain = (float(ms) / 1e3 for ms in (r["t (ms)"], r["tree (ms)"], few))
        given.append((int(r["N"]), t, tree, chain))
    target = next((tree for N, t, tree, _ in given if (N, t) == (8, 0.02)), None)
    if target is None:
        raise UserError(
            "bench_span.csv: no row with N = 8 and t = 20 to fit Ray's hop to; run bench span"
        )
    low, high = 0.0, 0.02
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if emulated(8, 0.02, middle, False) < target else (low, middle)
    rows = []
    for N, t, tree, chain in given:
        fitted = ", the hop is fitted to this" if (N, t) == (8, 0.02) else ""
        name = f"span N={N} t={1000 * t:.0f} ms"
        rows.append(line(f"{name}, tree{fitted}", emulated(N, t, low, False), tree))
        rows.append(line(f"{name}, chain", emulated(N, t, low, True), chain))
    return rows, low


def check_step(measured: Sequence[Mapping[str, str]], hop: float) -> list[dict[str, Any]]:
    """Rows for real ViT blocks: a block's price is that of one process, the rest is predicted."""
    ms = {r["step"]: float(r["ms (median)"]) / 1e3 for r in measured}
    tree = Tree(8)
    inner = sum(not tree.is_spine(n) for n in tree.nodes.values())
    applications = len(tree.nodes) + inner  # the head, a linear map, costs next to nothing
    block = ms["local, 1 thread"] / (3 * applications)
    bp = ms["local, 2 threads"] * (tree.N - 1) / applications
    rows = [line("ViT, BP, 2 threads", bp, ms["BP, 2 threads"])]
    layout = replace(pack(tree, 2), one_machine=True)
    for name, samples in ((r["step"], r["samples"]) for r in measured if r["calls per step"]):
        shares = [int(n) / 32 for n in samples.split(" + ")]
        step = price(
            one_step(tree, Rule(objective="node"), layout, True, len(shares)),
            2,
            partial(by_verb, {"lift": block, "answer": 3 * block, "backward": 2 * block}, shares),
            partial(constant, 4 * 32 * 64 * 240 / len(shares)),  # float32, 64 tokens, width 240
            SHARED,
            plan_checks.runtime_of(name, hop),
        )
        rows.append(line(f"ViT, {name}", step.seconds, ms[name]))
    return rows


def by_verb(prices: Mapping[str, float], shares: Sequence[float], call: Call) -> float:
    """The price of a call whose ops run one after the other, for its share of the batch."""
    return shares[call.piece] * sum(prices.get(op.verb, 0.0) for op in call.ops)


def constant(state: float, name: str) -> float:
    """All tensors that travel have one size."""
    return state


def error_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Median of how far predictions are off, as a factor."""
    ratios = [row["predicted / measured"] for row in rows]
    return statistics.median(max(r, 1 / r) for r in ratios)
