"""What `train` must know of a network to log, score and describe a run. Pure Python, no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeprop_ray.config import Settings
from treeprop_ray.core.jumps import jumps, window_of
from treeprop_ray.core.tree import Tree

if TYPE_CHECKING:
    from treeprop_ray.engine.base import Score


LATE = 10  # epochs


@dataclass(frozen=True)
class Outline:
    """A run's shape: where losses arise and what they weigh, which paths and parts there are.

    A place is where loss terms arise: a node (N is the head), or a depth of a time tree.
    """

    tree: Tree
    paths: Mapping[str, list[int]]  # scored after every epoch; `full` is the deployed network
    weights: Mapping[int, Mapping[str, float]]  # place -> loss term -> weight in the objective
    deployed: frozenset[str]  # names of the parts of the deployed network
    applications: int  # forward applications of blocks in one step
    curves: str = ""  # losses are drawn over the steps: what a place is called
    over_time: bool = False  # places are depths
    head_blocks: int = 0  # the last edge of a path is (or holds) a block like the others
    perplexity: bool = False  # a language model: exp(loss) is the score that counts
    clean: tuple[Sequence[int], int] | None = None  # path and place whose cross-entropies compare

    @property
    def columns(self) -> list[str]:
        """Columns of metrics.csv for losses and scores."""
        return [
            *(f"loss/{place}" for place in self.weights),
            *(f"{term}/{place}" for place, terms in self.weights.items() for term in terms),
            *(f"{kind}/{p}" for p in self.paths for kind in ("accuracy", "val_loss")),
        ]

    def stages(
        self, steps: int, second: tuple[int, float] | None
    ) -> dict[str, dict[str, int]] | None:
        """Steps and block applications per step of each stage, for a method that has two."""
        if second is None:
            return None
        layers = {"steps": second[0], "block_applications_per_step": self.applications}
        head = {"steps": steps - second[0], "block_applications_per_step": self.tree.N}
        return {"layers": layers, "head": head}

    def blocks(self, path: Sequence[int]) -> int:
        """Blocks (cells) of a path, the head itself not counted."""
        return len(path) - 2 + self.head_blocks

    def score(self, score: Score) -> float:
        """The figure to show: accuracy, or perplexity = exp(mean token loss)."""
        return perplexity(score.loss) if self.perplexity else score.accuracy

    def show(self, score: Score) -> str:
        """That figure as text."""
        value = self.score(score)
        return f"{value:.3f}  " if self.perplexity else f"{100 * value:.2f} %"

    def figures(self, score: Score) -> dict[str, float]:
        """All figures of a score, for summary.json."""
        more = {"perplexity": perplexity(score.loss)} if self.perplexity else {}
        return {"loss": score.loss, "accuracy": score.accuracy, **more}

    def better(self, loss: float, accuracy: float, best: Mapping[str, float]) -> bool:
        """Whether a score beats the best so far."""
        if self.perplexity:
            return loss < best.get("loss", math.inf)
        return accuracy > best["accuracy"]

    def over_epochs(self, tests: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Of the test figures of many epochs: the best ones, and the mean of the last ten."""
        if not tests:
            return {}
        best = tests[0]
        for test in tests:
            best = test if self.better(test["loss"], test["accuracy"], best) else best
        late = {k: statistics.fmean(t[k] for t in tests[-LATE:]) for k in best if k != "epoch"}
        return {"highest": dict(best), "late": late}


def perplexity(loss: float) -> float:
    """exp(mean token loss); infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def layerwise(tree: Tree, deployed: frozenset[str]) -> Outline:
    """A run of CFF+M: a contrastive loss at every layer, cross-entropy at the head.

    A layer runs twice in a step, on two views of the batch; in the second stage all layers run
    once, forward only, and the head once.
    """
    layer = {"contrast": 1.0, "clamped": 0.0}
    weights = {n: dict(layer) for n in range(1, tree.N)}
    weights[tree.N - 1]["validation"] = 0.0
    weights[tree.N] = {"ce": 1.0}
    applications = 2 * (tree.N - 1)
    return Outline(tree, {"full": tree.chain}, weights, deployed, applications, curves="layer")


def over_time(settings: Settings) -> Outline:
    """A recurrent run: losses by depth, the tree readout and the deployed chain."""
    time = settings.time
    tree = Tree(2**time.depth)
    deployed = frozenset({"f0", "readout"})
    if settings.method != "tree":
        return Outline(
            tree, {"full": tree.chain}, {0: {"ce": 1.0}}, deployed, tree.N, "depth", True, 1
        )
    terms: dict[int, dict[str, float]] = {d: {"ce": 1.0} for d in range(time.depth)}
    for d in range(time.depth - 1):
        terms[d]["right"] = 1.0  # the coarsest depth has one node, whose target is the label
    if time.sweeps:
        terms[0]["cons"] = time.lambda_cons
    spine = tree.spine_paths
    # two applications per node; the first sweep is already there when others follow
    applications = 2 * (tree.N - 1) + max(time.sweeps - 1, min(1, time.sweeps)) * tree.N
    if time.recipe == "lookahead":  # the deployed cell has no nodes: the tree ends at depth 1
        moved = [len(m) for m in jumps(time.depth, window_of(time.depth)).values()]
        terms[0] = {"roll": 1.0, "look": 1.0} if moved else {"roll": 1.0}
        applications += sum(moved)
        spine = spine[:-1] or spine
    paths = {"tree": spine[-1], "full": tree.chain}
    return Outline(tree, paths, terms, deployed, applications, "depth", True, 1)
