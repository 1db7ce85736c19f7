"""What a run's scores say: which step was the best, what the test split gives, when to stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeprop_ray.config import Settings
from treeprop_ray.engine import Engine
from treeprop_ray.methods.outline import Outline
from treeprop_ray.run.callbacks import Scores


class Judge:
    """Scores the paths of a run and remembers what later evaluations are compared with."""

    def __init__(self, settings: Settings, outline: Outline) -> None:
        self.settings, self.outline = settings, outline
        self.best: dict[str, Any] = {"accuracy": -1.0, "step": -1}
        self.tests: list[dict[str, float]] = []  # eval_test: figures of the full chain, by epoch
        self.ahead: dict[str, Any] = {"accuracy": -1.0, "epoch": 0}  # best validation, for patience
        self.validation: Scores = {}  # the last scores, of the time after `scored` steps
        self.scored = -1

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the scores so far."""
        return {"best": self.best, "tests": self.tests, "ahead": self.ahead}

    def take_up(self, meta: Mapping[str, Any], epoch: int) -> None:
        """Go on from the scores of a checkpoint; older ones say less."""
        self.best, self.tests = meta["best"], meta.get("tests", [])
        self.ahead = meta.get("ahead", {**self.ahead, "epoch": epoch})

    def evaluate(self, engine: Engine, done: int, epoch: int, saves: bool) -> Scores:
        """Score every path on the validation split, if there is one."""
        if not engine.job.splits["validation"]:
            return {}
        self.validation = scores = engine.score(self.outline.paths, "validation")
        self.scored = done
        figures = self.outline.figures(scores["full"])
        self._test(engine, done, epoch, figures, saves)
        if self.outline.better(figures, self.ahead):
            self.ahead = {**figures, "epoch": epoch}
        return scores

    def _test(
        self, engine: Engine, done: int, epoch: int, figures: dict[str, float], saves: bool
    ) -> None:
        """Keep the best validation score with the test score of the same weights beside it, and
        with eval_test the test score of every evaluation."""
        is_best = saves and self.outline.better(figures, self.best)
        if not (is_best or self.settings.eval_test):
            return
        test: dict[str, float] = {}
        if engine.job.splits["test"]:
            score = engine.score({"full": self.outline.paths["full"]}, "test")["full"]
            test = self.outline.figures(score)
        if is_best:
            kinds = ("accuracy", "loss")
            shown = {kind: figures[kind] for kind in kinds if kind in figures}
            self.best = {**shown, "step": done, "test": test}
        if self.settings.eval_test:
            self.tests.append({"epoch": epoch, **test})

    @property
    def last_test(self) -> Mapping[str, float]:
        """With eval_test the test figures of the last evaluation."""
        return self.tests[-1] if self.settings.eval_test else {}

    def out_of_patience(self, epoch: int) -> str:
        """Early stopping: why the run ends, if no epoch has been better for too long."""
        patience, best = self.settings.patience, self.ahead["epoch"]
        if patience and epoch - best >= patience:
            return f"no better validation score since epoch {best} (patience={patience})"
        return ""

    def final(self, engine: Engine, done: int) -> dict[str, Scores]:
        """The scores of all paths at the end, by split."""
        return {
            split: self.validation if split == "validation" and self.scored == done
            else engine.score(self.outline.paths, split)
            for split in ("validation", "test")
            if engine.job.splits[split]
        }  # fmt: skip
