"""Figures of a run: loss per node drawn on the tree, accuracy per path over the epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.patches import Patch

from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.methods.outline import Outline
from treeprop_ray.reporting.plot import plt, save
from treeprop_ray.reporting.timeline import COLORS
from treeprop_ray.schedule.ops import Layout
from treeprop_ray.schedule.tree import one_piece


def run_figures(folder: Path, outline: Outline) -> None:
    """Draw tree_loss.png (or depth_loss.png, layer_loss.png) and the score of every path."""
    tree = outline.tree
    rows = pd.read_csv(folder / "metrics.csv")
    out = folder / "figures"
    out.mkdir(exist_ok=True)
    steps = rows[rows.kind == "step"]
    if outline.curves and not steps.empty:
        loss_curves(steps, list(outline.weights), outline.curves, out)
    elif not steps.empty and any(
        steps.get(f"loss/{n}", pd.Series()).notna().any() for n in tree.nodes
    ):
        tree_loss(tree, {n: steps[f"loss/{n}"].iloc[-1] for n in tree.nodes}, out / "tree_loss.png")
    epochs = rows[rows.kind == "epoch"]
    if not epochs.empty:
        path_scores(epochs, outline.perplexity, out)


def tree_loss(
    tree: Tree,
    loss: dict[int, float],
    target: Path,
    title: str = "loss per node at the last step",
) -> None:
    """Nodes at (n, level), coloured by their last loss; grey lines join a node to its children."""
    fig, ax = plt.subplots(figsize=(max(5.0, 0.6 * tree.N + 1.5), 1.0 + 0.8 * tree.depth))
    for node in tree.nodes.values():
        for child in (tree.left_child(node), tree.right_child(node)):
            if child:
                ax.plot([node.n, child.n], [node.level, child.level], color="0.8", zorder=1)
    nodes = list(tree.nodes.values())
    points = ax.scatter(
        [n.n for n in nodes], [n.level for n in nodes], c=[loss[n.n] for n in nodes],
        s=420, cmap="viridis", zorder=2,
    )  # fmt: skip
    for node in nodes:
        ax.annotate(
            str(node.n), (node.n, node.level), ha="center", va="center", color="w", fontsize=8
        )
        if tree.N <= 32:
            below = (node.n, node.level + 0.42)
            ax.annotate(f"{loss[node.n]:.3g}", below, ha="center", va="center", fontsize=7)
    ax.set(
        xlim=(-0.5, tree.N + 0.5), ylim=(tree.depth + 0.8, 0.4), xlabel="state n", ylabel="level"
    )
    ax.set_yticks(range(1, tree.depth + 1))
    ax.set_title(title)
    fig.colorbar(points, ax=ax)
    save(fig, target)


def loss_curves(steps: pd.DataFrame, places: list[int], kind: str, out: Path) -> None:
    """Loss of every depth of a time tree, or of every layer, over the steps."""
    fig, ax = plt.subplots(figsize=(6, 4))
    for place in places:
        ax.plot(steps.step, steps[f"loss/{place}"], label=f"{kind} {place}")
    ax.set(xlabel="step", ylabel="loss", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend()
    save(fig, out / f"{kind}_loss.png")


def path_scores(epochs: pd.DataFrame, perplexity: bool, out: Path) -> None:
    """Validation score of every path over the epochs: path_<kind>.png."""
    fig, ax = plt.subplots(figsize=(6, 4))
    judged = epochs.filter(like="accuracy/").notna().any(axis=None)
    kind, unit, scale = ("accuracy", " (%)", "linear") if judged else ("loss", "", "log")
    if perplexity:
        kind, unit, scale = "perplexity", "", "log"
    start = "accuracy/" if kind == "accuracy" else "val_loss/"
    for column in (c for c in epochs.columns if c.startswith(start)):
        values = 100 * epochs[column] if kind == "accuracy" else epochs[column].astype(float)
        values = np.exp(values) if perplexity else values
        ax.plot(epochs.epoch, values, marker=".", label=column.partition("/")[2])
    ax.set(xlabel="epoch", ylabel=f"validation {kind}{unit}", yscale=scale)
    ax.grid(alpha=0.3)
    ax.legend()
    save(fig, out / f"path_{kind}.png")


def schedule(tree: Tree, rule: Rule) -> plt.Figure:
    """The waves of a step with an actor per node: a row per actor, a box per call."""
    layout = Layout({n: n for n in tree.nodes})
    waves = one_piece(tree, rule, layout, stem_trains=True)
    rows = ["ends", *(f"node {n}" for n in tree.nodes)]
    place = {layout.boundary: 0, **{n: i for i, n in enumerate(tree.nodes, 1)}}
    fig, ax = plt.subplots(figsize=(max(6.0, 0.55 * len(waves) + 1.5), 1.2 + 0.3 * len(rows)))
    used: dict[str, str] = {}
    for column, (_, calls) in enumerate(waves):
        for call in calls:
            color = used.setdefault(call.phase, COLORS.get(call.phase, "0.5"))
            ax.barh(place[call.host], 1, left=column, color=color, edgecolor="w", height=0.85)
            verbs = {op.verb for op in call.ops}
            both = call.phase != "backward" and "backward" in verbs
            text = f"{call.level}" + ("+b" if both else "")
            middle = (column + 0.5, place[call.host])
            ax.text(*middle, text, ha="center", va="center", color="w", fontsize=7)
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="wave", title="waves of a step; number: level, +b: with its backward")
    patches = [Patch(color=color, label=phase) for phase, color in used.items()]
    ax.legend(handles=patches, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    fig.tight_layout()
    return fig
