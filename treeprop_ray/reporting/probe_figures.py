"""Figures of the probe, from probe.csv: alignment, KL per state, label leak, the bound."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.tree import Tree
from treeprop_ray.reporting.figures import tree_loss
from treeprop_ray.reporting.plot import plt, save


def draw(folder: Path, tree: Tree) -> None:
    """Draw figures/probe_*.png of a run folder; nothing if it has no probe.csv with rows."""
    if not (folder / "probe.csv").is_file():
        return
    rows = pd.read_csv(folder / "probe.csv").sort_values("step")
    if rows.empty:
        return
    out = folder / "figures"
    out.mkdir(exist_ok=True)
    alignment(rows, out / "probe_alignment.png")
    blocks(rows, tree, out / "probe_blocks.png")
    kl_states(rows, tree, out / "probe_kl.png")
    last = rows.iloc[-1]
    title = f"KL of each state to the chain's transition, step {int(last.step)}"
    tree_loss(tree, {n: last[f"kl/{n}"] for n in tree.nodes}, out / "probe_tree.png", title)
    leak(rows, tree, out / "probe_leak.png")
    if rows["F"].notna().any():
        bound(rows, out / "probe_bound.png")


def alignment(rows: pd.DataFrame, target: Path) -> None:
    """Cosine of update and true gradient, and the bias against the true gradient."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    left.plot(rows.step, rows.cosine, marker=".")
    left.axhline(0, color="0.6", lw=0.8)
    left.set(xlabel="step", ylabel="cos(g, g_hat)", ylim=(min(-0.05, rows.cosine.min()), 1.02))
    left.set_title("alignment with backpropagation, whole chain")
    for column, label in (
        ("norm_bp", "|g|, backpropagation"),
        ("norm_tree", "|g_hat|, TreeProp"),
        ("norm_bias", "|b| = |g_hat - g|"),
    ):
        right.plot(rows.step, rows[column], marker=".", label=label)
    right.set(xlabel="step", yscale="log", title="|b| < |g| is sufficient for descent")
    right.legend(fontsize=8)
    for ax in (left, right):
        ax.grid(alpha=0.3)
    save(fig, target)


def blocks(rows: pd.DataFrame, tree: Tree, target: Path) -> None:
    """Heat map: cosine of every chain block over the probes."""
    names = [edge_name(e) for e in (STEM, *tree.path_edges(tree.chain))]
    names = [n for n in names if rows.get(f"cosine/{n}", pd.Series(dtype=float)).notna().any()]
    values = rows[[f"cosine/{n}" for n in names]].to_numpy().T
    fig, ax = plt.subplots(figsize=(max(5.0, 0.25 * len(rows) + 3), 1.2 + 0.32 * len(names)))
    image = ax.imshow(values, aspect="auto", vmin=-1, vmax=1, cmap="RdBu", origin="lower")
    ax.set_yticks(range(len(names)), names)
    shown = range(0, len(rows), max(1, len(rows) // 8))
    ax.set_xticks(list(shown), [str(int(rows.step.iloc[i])) for i in shown])
    ax.set(xlabel="step", ylabel="chain block", title="cosine per block")
    fig.colorbar(image, ax=ax)
    save(fig, target)


def kl_states(rows: pd.DataFrame, tree: Tree, target: Path) -> None:
    """KL of every state over training, coloured by level; dashed: the sum."""
    fig, ax = plt.subplots(figsize=(7, 4.2))
    colors = plt.get_cmap("viridis")
    for node in sorted(tree.nodes.values(), key=lambda node: (node.level, node.n)):
        values = rows[f"kl/{node.n}"]
        color = colors((node.level - 1) / max(1, tree.depth))
        label = f"z_{node.n}, level {node.level}" if tree.N <= 16 else None
        ax.plot(rows.step, values.where(values > 0), marker=".", color=color, label=label)
    ax.plot(rows.step, rows.kl, color="0.3", ls="--", label="sum")
    ax.set(xlabel="step", ylabel="KL (nats per label)", yscale="log")
    ax.set_title("KL of each state's factor to the chain's transition")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)
    save(fig, target)


def leak(rows: pd.DataFrame, tree: Tree, target: Path) -> None:
    """Clean-path minus tree cross-entropy for every spine node."""
    fig, ax = plt.subplots(figsize=(6, 3.6))
    for node in tree.spine:
        label = f"spine node {node.n}, level {node.level}"
        ax.plot(rows.step, rows[f"leak/{node.n}"], marker=".", label=label)
    ax.axhline(0, color="0.6", lw=0.8)
    ax.set(xlabel="step", ylabel="clean CE - tree CE (nats)", title="label leak per spine level")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    save(fig, target)


def bound(rows: pd.DataFrame, target: Path) -> None:
    """The bound F by draws and at the means, its CE, the likelihood by importance sampling."""
    fig, ax = plt.subplots(figsize=(6, 3.6))
    for column, label in (
        ("F", "F"),
        ("F_mean", "F at the means"),
        ("F_ce", "cross-entropy part of F"),
        ("nll", "-log p(y | x), importance sampling"),
    ):
        if column in rows:  # F_mean is younger than the others
            ax.plot(rows.step, rows[column], marker=".", label=label)
    ax.set(xlabel="step", ylabel="nats per label", title="the variational bound", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    save(fig, target)
