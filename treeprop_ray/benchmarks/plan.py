"""bench plan: step time and memory on clusters that are not here, and how far to trust the figures.

One table prices GPT-2 large and longer chains of its blocks (cost_model.py); nothing in it was
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

from treeprop_ray.benchmarks.cost_model import (
    Device,
    Link,
    Network,
    Priced,
    Runtime,
    best,
    copies_memory,
    copies_step,
    layout_for,
    pipeline_memory,
    pipeline_step,
    pipelines_memory,
    pipelines_step,
    price,
    replica_memory,
    replica_step,
    tree_memory,
    tree_step,
)
from treeprop_ray.benchmarks.emulated import HOSTS
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.span import as_the_paper, chain_calls, tree_calls
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.tables import markdown, write_table
from treeprop_ray.schedule.ops import Call
from treeprop_ray.schedule.placement import pack
from treeprop_ray.schedule.tree import one_step

# Assumptions, not measurements: an A100 of 80 GB at 40 % of its bf16 peak; what links deliver.
DEVICE, MEMORY = Device(), 80e9
LINKS = (
    Link("NVLink", 300e9, 20e-6),
    Link("PCIe", 20e9, 50e-6),
    Link("Ethernet", 10e9, 100e-6),  # 100 Gbit/s
)
SUBMIT = 0.25e-3  # seconds of the driver per call, measured on this machine
FREE = Runtime()
SIZES = {"GPT-2 large": 36, "64 blocks": 64, "256 blocks": 256, "1024 blocks": 1024}
DEVICES = (8, 64, 512)
TREE_PIECES, CHAIN_PIECES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)
COPIES = (1, 2, 4, 8, 16)


def run(bench: BenchSettings) -> None:
    """Print and write both tables."""
    checks, hop = check_span(read(bench.out, "bench_span"))
    checks += check_step(read(bench.out, "bench_step_ray"), hop)
    off = f"Median factor between predicted and measured: {error_of(checks):.2f}."
    table = write_table(
        bench.out, "bench_plan_check", "Cost model against measured", checks, [*CHECK, "", off]
    )
    print(f"{table}\n{off}")
    ray = Runtime(hop, SUBMIT)
    rows = []
    for name, N in SIZES.items():
        for count in DEVICES:
            for link in links(count):
                rows.append(row_of(name, Network(N), count, link, ray))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    print(write_table(bench.out, "bench_plan", "Predicted step times", rows, notes(hop)))


def links(count: int) -> Sequence[Link]:
    """Eight devices may sit in one machine; more are joined by the network."""
    return LINKS if count <= 8 else LINKS[-1:]


def row_of(name: str, net: Network, count: int, link: Link, ray: Runtime) -> dict[str, Any]:
    """One cluster: the three methods, each with its best number of micro-batches."""
    layout = layout_for(Tree(net.N), count)
    m, tree = best(TREE_PIECES, lambda m: tree_step(net, layout, m, DEVICE, link, ray))
    bare = best(TREE_PIECES, lambda m: tree_step(net, layout, m, DEVICE, link, FREE))[1]
    stages = min(count, net.N)
    k, chain = best(CHAIN_PIECES, lambda m: pipeline_step(net, stages, m, DEVICE, link, FREE))
    replicas = min(count, net.batch)
    copies = replica_step(net, replicas, DEVICE, link)
    trees = best_copies(copies_step, copies_memory, net, count, link, ray, TREE_PIECES)
    pipes = best_copies(pipelines_step, pipelines_memory, net, count, link, FREE, CHAIN_PIECES)
    memory = {
        "TreeProp": tree_memory(net, layout, m),
        "trees": copies_memory(net, count, *trees[:2]),
        "GPipe": pipeline_memory(net, stages, k),
        "pipelines": pipelines_memory(net, count, *pipes[:2]),
        "DP": replica_memory(net, replicas),
    }
    seconds = {
        "TreeProp": tree.seconds,
        "trees": trees[2].seconds,
        "GPipe": chain.seconds,
        "pipelines": pipes[2].seconds,
        "DP": copies,
    }
    fitting = {n: s for n, s in seconds.items() if memory[n] <= MEMORY}
    return {
        "network": name,
        "GPUs": count,
        "used": f"{len(layout.hosts)} / {stages} / {replicas}",
        "link": link.name,
        "TreeProp (ms)": shown(tree, m),
        "without Ray": round(1000 * bare.seconds),
        "trees x R (ms)": with_copies(*trees),
        "GPipe (ms)": shown(chain, k),
        "GPipe x R (ms)": with_copies(*pipes),
        "DP (ms)": round(1000 * copies),
        "GB per GPU": " / ".join(f"{b / 1e9:.0f}" for b in memory.values()),
        "GB per wave": tree.wave / 1e9,
        "fastest that fits": min(fitting, key=lambda n: fitting[n]) if fitting else "none",
    }


def best_copies(
    step_of: Callable[..., Priced],
    memory_of: Callable[..., float],
    net: Network,
    count: int,
    link: Link,
    ray: Runtime,
    pieces: Sequence[int],
) -> tuple[int, int, Priced]:
    """(copies, micro-batches of each, step): the fastest that fits, or the fastest."""
    options = []
    for R in (R for R in COPIES if min(count, net.batch) >= R):
        for m in (m for m in pieces if R * m <= net.batch):
            step = step_of(net, count, R, m, DEVICE, link, ray)
            options.append((memory_of(net, count, R, m) > MEMORY, step.seconds, R, m, step))
    _, _, R, m, step = min(options, key=lambda option: option[:2])
    return R, m, step


def shown(step: Priced, pieces: int) -> str:
    """Milliseconds and micro-batches; a star where the driver is the limit."""
    star = "*" if step.driver >= step.path else ""
    return f"{1000 * step.seconds:.0f}{star} (m={pieces})"


def with_copies(copies: int, pieces: int, step: Priced) -> str:
    """The same, with the number of copies."""
    return f"{shown(step, pieces)[:-1]}, R={copies})"


def notes(hop: float) -> list[str]:
    """What the table assumes."""
    net, gpu = Network(36), DEVICE
    rates = ", ".join(f"{l.name} {l.bandwidth / 1e9:.0f} GB/s" for l in LINKS)
    return [
        f"""**Nothing in this table was measured.** Network: Transformer blocks of GPT-2 large
(width {net.width}, {net.tokens} tokens, vocabulary {net.vocabulary}), the last with the
language-model head; batch {net.batch} sequences, the same for all methods. GPU:
{gpu.peak / 1e12:.0f} TFLOP/s (bf16) at {100 * gpu.share:.0f} %, less for pieces of few tokens,
with {MEMORY / 1e9:.0f} GB. Links: {rates}. Ray, as on this machine: {1000 * hop:.1f} ms from call
to call (fitted, see bench_plan_check.md) and {1000 * SUBMIT:.2f} ms of the driver per call. GPipe
and DP are priced without Ray.""",
        "",
        f"""TreeProp: beta = 0, packed layout, objective=node. GPipe: stages of equal length, one
forward one backward. DP: data-parallel backpropagation, ring all-reduce, half of it hidden; at most
one replica per sequence. x R: R copies of the tree (`replicas=R`) or of the pipeline, each with its
share of the batch, none of the exchange of gradients hidden; the fastest R of those that fit.
`used`: GPUs that TreeProp (at most one per line, N / 2), GPipe (at most N) and DP can use. m:
micro-batches (of a copy), the best of those tried. A star: the driver is the limit. `GB per GPU`:
the fullest one, in the order of the columns; more than {MEMORY / 1e9:.0f} does not fit. `GB per
wave`: the most that all actors of one tree together send after one level.""",
    ]


CHECK = [
    "Predicted: the cost model with blocks that sleep (span) or whose price is that of one process "
    "(ViT). Ray's time from call to call is fitted to one row and used in all others. Measured: "
    "bench_span.csv and bench_step_ray.csv in this folder. The model knows no noise, no sharing of "
    "cores and no update, so with long blocks it errs on the fast side; where adjoints are sent "
    "before the gradients of weights, which it does not know either, on the slow side.",
]

# -- the model against what was measured here ------------------------------------------------------


def read(out: str, name: str) -> list[dict[str, str]]:
    """A table that another benchmark wrote."""
    path = Path(out) / f"{name}.csv"
    if not path.is_file():
        how = "span" if name.endswith("span") else "step engine=ray"
        raise UserError(f"out={out}: no {path.name} to check the model against; run bench {how}")
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def line(what: str, predicted: float, measured: float) -> dict[str, Any]:
    """A row of the second table, in milliseconds."""
    return {
        "run": what,
        "predicted (ms)": 1000 * predicted,
        "measured (ms)": 1000 * measured,
        "predicted / measured": predicted / measured,
    }


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
    target = next(tree for N, t, tree, _ in given if (N, t) == (8, 0.02))
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
    shm = Link("object store", 800e6, 0.0)  # as doctor measures it here
    by_store = [r for r in measured if r["calls per step"] and "stream" not in r["step"]]
    for name, samples in ((r["step"], r["samples"]) for r in by_store):
        shares = [int(n) / 32 for n in samples.split(" + ")]
        step = price(
            one_step(tree, Rule(objective="node"), layout, True, len(shares)),
            2,
            partial(by_verb, {"lift": block, "answer": 3 * block, "backward": 2 * block}, shares),
            partial(constant, 4 * 32 * 64 * 240 / len(shares)),  # float32, 64 tokens, width 240
            shm,
            Runtime(hop, SUBMIT),
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
