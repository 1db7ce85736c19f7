"""What a trainer must know of a method to log, score and describe a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeprop_ray.core.scoring import Score
from treeprop_ray.core.tree import Tree

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
    judges: bool = True  # labels are right or wrong; else the loss is the score that counts
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
        """Blocks (layers, where blocks have several; cells) of a path, the head not counted."""
        layers = len(path) - 2
        if self.tree.grouping:
            layers = sum(map(self.tree.layers, self.tree.path_edges(path)[:-1]))
        return layers + self.head_blocks

    def score(self, score: Score) -> float:
        """The figure to show: accuracy, perplexity = exp(mean token loss), or the loss itself."""
        if self.perplexity:
            return perplexity(score.loss)
        return score.accuracy if self.judges else score.loss

    def show(self, score: Score, digits: int = 2) -> str:
        """That figure as text, with so many digits behind the point of a per cent."""
        value = self.score(score)
        if self.perplexity:
            return f"{value:.{digits + 1}f}  "
        return f"{100 * value:.{digits}f} %" if self.judges else f"{value:.{digits + 2}g}  "

    def figures(self, score: Score) -> dict[str, float]:
        """All figures of a score, for summary.json."""
        more = {"perplexity": perplexity(score.loss)} if self.perplexity else {}
        accuracy = {"accuracy": score.accuracy} if self.judges else {}
        return {"loss": score.loss, **accuracy, **more, **score.own}

    def better(self, figures: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether the figures of a score beat the best so far."""
        if self.perplexity or not self.judges:
            return figures["loss"] < best.get("loss", math.inf)
        return figures["accuracy"] > best["accuracy"]

    def table(
        self, paths: Mapping[str, Sequence[int]], scores: Mapping[str, Mapping[str, Score]]
    ) -> str:
        """Accuracy (or perplexity, or loss) of paths on every split, as plain text."""
        what = "layers" if self.tree.grouping else "blocks"
        lines = [f"{'path':<10} {what:>6}  " + "  ".join(f"{split:>10}" for split in scores)]
        if self.perplexity:
            lines.insert(0, "perplexity = exp(mean token loss)")
        elif not self.judges:
            lines.insert(0, "mean loss, lower is better")
        for name, path in paths.items():
            cells = "  ".join(f"{self.show(scores[split][name]):>10}" for split in scores)
            shown = [str(i) for i in path]
            if len(shown) > 40:
                shown[3:-1] = ["…"]
            lines.append(f"{name:<10} {self.blocks(path):>6}  {cells}   {'-'.join(shown)}")
        return "\n".join(lines)

    def over_epochs(self, tests: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Of the test figures of many epochs: the best ones, and the mean of the last ten."""
        if not tests:
            return {}
        best = tests[0]
        for test in tests:
            best = test if self.better(test, best) else best
        late = {k: statistics.fmean(t[k] for t in tests[-LATE:]) for k in best if k != "epoch"}
        return {"highest": dict(best), "late": late}


def perplexity(loss: float) -> float:
    """exp(mean token loss); infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf
