"""bench step: a TreeProp step against a backpropagation step of the same chain, and both against
the bare operations of torch that they need: what the hosts, schedules and reports cost."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from treeprop_ray import config, engine
from treeprop_ray.benchmarks.random_data import MNIST, random_images, random_job
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.benchmarks.timing import in_turn, ratio, steps_of
from treeprop_ray.core.network import STEM, TreeNetwork, edge_name
from treeprop_ray.core.objective import tree_objective
from treeprop_ray.core.rule import cut
from treeprop_ray.methods import Job
from treeprop_ray.reporting.tables import write_table

BASE = ["experiment=mnist_d3", "batch=64", "threads=1"]
SIZES = (500, 100)  # hidden width
CANDIDATES = {
    "bp": ["method=bp"],
    "tree, beta = 0": ["alpha=1", "beta=0"],
    "tree, beta = 0.5": ["alpha=0.5", "beta=0.5"],
}
BARE = ", bare torch"


def run(bench: BenchSettings) -> None:
    """Sigmoid MLP, N = 8, hidden 500 and 100, batch 64."""
    rows = [row for hidden in SIZES for row in rows_of(hidden, bench.steps, bench.rounds)]
    notes = [
        "Sigmoid MLP, N = 8, batch 64, MNIST-shaped random input, one torch thread. Median over "
        f"{bench.rounds} rounds of {bench.steps} steps, candidates timed in turn; a ratio is taken "
        "round by round. Block applications count every forward of a block (the head counts); each "
        "has one backward.",
        "",
        "`bare torch`: the same modules, the objective as one graph (`core/objective.py`, for bp "
        "the chain and cross-entropy), one `backward()` and torch's fused AdamW, in a loop that "
        "does nothing else: no schedule, hosts, seeds for dropout, checks or reports. `time / bare "
        "torch` is what those cost.",
    ]
    print(write_table(bench.out, "bench_step", "Step time, one process", rows, notes))


def rows_of(hidden: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """All candidates with one width."""
    data, clock = random_images(4096, MNIST), itertools.count()
    work, applications = {}, {}
    for name, words in CANDIDATES.items():
        job = random_job(config.load([*BASE, f"model.hidden={hidden}", *words]), data)
        work[name] = steps_of(engine.build(job), steps, clock)
        work[name + BARE] = bare_steps(job, name == "bp", steps, clock)
        applications[name] = job.method.outline(job.settings, job.tree).applications
    seconds = in_turn(work, rounds)
    return [
        {
            "hidden": hidden,
            "step": name,
            "ms (median)": 1000 * statistics.median(seconds[name]) / steps,
            "time / bp": ratio(seconds, name, "bp"),
            "bare torch (ms)": 1000 * statistics.median(seconds[name + BARE]) / steps,
            "time / bare torch": ratio(seconds, name, name + BARE),
            "block applications": applications[name],
            "applications / bp": applications[name] / applications["bp"],
        }
        for name in CANDIDATES
    ]


def bare_steps(job: Job, chain_only: bool, count: int, clock: Iterator[int]) -> Callable[[], None]:
    """The next steps of a job with nothing but torch's own operations."""
    edges = job.tree.path_edges(job.tree.chain) if chain_only else list(job.tree.blocks)
    parts = job.parts([edge_name(edge) for edge in (STEM, *edges)])
    modules = nn.ModuleList(parts.values())
    optimizer = torch.optim.AdamW(
        modules.parameters(), lr=job.settings.lr, weight_decay=0.01, fused=True
    )
    batches = job.batches()
    if chain_only:
        network: nn.Module = nn.Sequential(*modules)
    else:
        blocks = {edge: parts[edge_name(edge)] for edge in edges}
        network = TreeNetwork(job.tree, parts[edge_name(STEM)], blocks, job.rule.family)

    def work() -> None:
        for step in itertools.islice(clock, count):
            x, y = batches(step)
            if isinstance(network, TreeNetwork):
                piece = cut(step, len(x), 1)[0]
                loss, _ = tree_objective(network, job.rule, x, y, piece)
            else:
                loss = F.cross_entropy(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return work
