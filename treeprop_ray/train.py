"""Train a network by TreeProp, or the same chain by a baseline.

    python -m treeprop_ray.train                                        # digits, a minute
    python -m treeprop_ray.train experiment=mnist_d3 model.hidden=100 epochs=15
    python -m treeprop_ray.train experiment=mnist_d3 method=bp          # backpropagation
    python -m treeprop_ray.train experiment=mnist_d3 method=cff         # forward-forward

The same command again continues an interrupted run. Flags: --help, --cfg (print the resolved
settings, with engine=ray the placement of every node too, and stop).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeprop_ray import cli, config
from treeprop_ray.config import Settings
from treeprop_ray.errors import TrainingError

if TYPE_CHECKING:
    from treeprop_ray.core.tree import Tree
    from treeprop_ray.data import DataSet
    from treeprop_ray.engine.base import Engine, Score
    from treeprop_ray.methods.outline import Outline
    from treeprop_ray.probe import Prober
    from treeprop_ray.run.metrics import Log


def run(settings: Settings) -> int:
    """The train command."""
    trainer = Trainer(settings)
    done = trainer.folder.summary
    if done is not None and done["steps"] >= trainer.total_steps:
        print(f"this run is finished; fresh=true starts it anew\n{done['table']}")
        print(f"files: {trainer.folder.path}")
        return cli.DONE
    if settings.engine == "train":
        from treeprop_ray.run.ray_train import train

        summary = train(trainer)
    else:
        summary = trainer.train()
    print(f"{summary['table']}\nfiles: {trainer.folder.path}")
    return cli.DONE


class Trainer:
    """Takes an engine through the steps of a run; knows nothing of what a network is made of."""

    def __init__(
        self,
        settings: Settings,
        command: str | None = None,
        on_epoch: Callable[[int, Mapping[str, Score]], None] | None = None,
    ) -> None:
        """`command` is recorded in the summary; `on_epoch` hears of each evaluation."""
        from treeprop_ray.data import Batches, load
        from treeprop_ray.run.folder import RunFolder

        self.settings = settings
        self.folder = RunFolder(settings, command)
        self.on_epoch = on_epoch
        self.data = load(settings)
        self.per_epoch = Batches(self.data, settings.batch, settings.seed).per_epoch
        self.total_steps = min(settings.steps or sys.maxsize, settings.epochs * self.per_epoch)
        self.best: dict[str, Any] = {"accuracy": -1.0, "step": -1}
        self.tests: list[dict[str, float]] = []  # eval_test: figures of the full chain, by epoch
        self.validation: Mapping[str, Score] = {}  # scores after the last step
        self.wall = 0.0
        self.start = 0
        self.prober: Prober | None = None
        self.saved = ""  # the last checkpoint

    def train(self) -> dict[str, Any]:
        """Run to the end; returns the summary."""
        from treeprop_ray.probe import Prober
        from treeprop_ray.run import checkpoint
        from treeprop_ray.run.progress import Bar

        self.engine = build_engine(self.settings, self.data, self.total_steps)
        try:
            self._open()
            found = checkpoint.newest(self.folder.storage)
            if found:
                self._resume(found)
            self.outline = outline_of(self.settings, self.engine.tree)
            self.paths = self.outline.paths
            self.log = self._make_log()
            if self.settings.probe.every:
                self.prober = Prober(self.settings, self.folder.path, self.engine, self.start)
                if self.start == 0:
                    self.log.pause(self.prober.at(0, 0))
            began = time.perf_counter()
            with Bar(self.folder.name, self.total_steps, self.start) as bar:
                for step in range(self.start, self.total_steps):
                    self._step(step, bar, began)
            self.wall += time.perf_counter() - began
            return self._finish()
        except TrainingError as e:
            raise TrainingError(f"{e}; last checkpoint: {self.saved or 'none yet'}") from e
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self.saved) from None
        finally:
            self.engine.close()

    def _open(self) -> None:
        self.folder.open()
        self.folder.keep_permutation(self.data.permutation)

    def _make_log(self) -> Log:
        from treeprop_ray.core.optim import OptimizerRule
        from treeprop_ray.run.metrics import Log

        rule = OptimizerRule.of(self.settings, self.total_steps)
        return Log(self.folder.path, self.outline, self.start, rule)

    def _resume(self, found: Any) -> None:
        from treeprop_ray.run import checkpoint

        check, N, split = checkpoint.check_fits, self.engine.tree.N, self.settings.split
        check(found, N, split)
        check(found, N, split, self.engine.state()[0])
        self.start, self.best = found.meta["step"], found.meta["best"]
        self.tests = found.meta.get("tests", [])
        self.saved = found.path
        self.engine.load((found.weights, found.optimizer), self.start)
        self.wall = found.meta["wall_seconds"]
        print(f"continuing from {found.path} (step {self.start} of {self.total_steps})", flush=True)

    def _step(self, step: int, bar: Any, began: float) -> None:
        s = self.settings
        epoch, done = (step + 1) // self.per_epoch, step + 1
        ends_epoch = done % self.per_epoch == 0 or done == self.total_steps
        logs = ends_epoch or done % s.log_every == 0
        saves = ends_epoch if s.checkpoint_every == 0 else done % s.checkpoint_every == 0
        saves = saves or done == self.total_steps
        clean = None
        if ends_epoch and self.outline.clean:
            clean = self.engine.clean_loss(self.outline.clean[0], step)
        self.engine.step(step, report=logs or saves)
        if logs:
            self.log.step(done, epoch, self.engine.reports(), clean)
        scores: Mapping[str, Score] = {}
        if ends_epoch and (epoch % s.eval_every == 0 or done == self.total_steps):
            self.validation = scores = self.engine.score(self.paths, "validation")
            self._test(done, epoch, scores["full"], saves)
            self.log.epoch(done, epoch, scores, self.tests[-1] if s.eval_test else {})
            shown = {name: self.outline.show(v).strip() for name, v in scores.items()}
            bar.line(
                f"epoch {epoch}/{s.epochs}  loss {self.log.loss:.4f}  {brief(shown)}",
                f"loss {self.log.loss:.3f}  val {'/'.join(shown.values())}",
            )
        if self.prober:
            self.log.pause(self.prober.at(done, epoch, last=done == self.total_steps))
        bar.advance()
        if saves:
            self._save(done, epoch, scores, self.wall + time.perf_counter() - began)
        if scores and self.on_epoch:
            self.on_epoch(epoch, scores)

    def _test(self, step: int, epoch: int, full: Score, saves: bool) -> None:
        """Keep the best validation score with the test score of the same weights beside it, and
        with eval_test the test score of every evaluation."""
        is_best = saves and self.outline.better(full.loss, full.accuracy, self.best)
        if not (is_best or self.settings.eval_test):
            return
        score = self.engine.score({"full": self.paths["full"]}, "test")["full"]
        test = self.outline.figures(score)
        if is_best:
            self.best = {
                "accuracy": full.accuracy, "loss": full.loss, "step": step, "test": test,
            }  # fmt: skip
        if self.settings.eval_test:
            self.tests.append({"epoch": epoch, **test})

    def _save(self, step: int, epoch: int, scores: Mapping[str, Score], wall: float) -> None:
        from treeprop_ray.run import checkpoint

        s, tree = self.settings, self.engine.tree
        weights, optimizer = self.engine.state()
        meta = {
            "step": step, "epoch": epoch, "seed": s.seed, "N": tree.N, "split": s.split,
            "best": self.best, "tests": self.tests, "wall_seconds": wall,
        }  # fmt: skip
        self.saved = checkpoint.save(self.folder.storage, weights, optimizer, meta)
        best = self.best["step"] if s.keep_best else None
        checkpoint.prune(self.folder.storage, step, s.keep_last, best)

    def _final_scores(self) -> dict[str, Mapping[str, Score]]:
        """Asks the engine; every worker of a data-parallel run must ask the same."""
        if not self.validation:  # a finished run whose summary was lost
            self.validation = self.engine.score(self.paths, "validation")
        return {"validation": self.validation, "test": self.engine.score(self.paths, "test")}

    def _finish(self) -> dict[str, Any]:
        """Test scores, figures, summary.json."""
        from treeprop_ray.reporting import figures, timeline

        s = self.settings
        scores = self._final_scores()
        table = table_of(self.outline, self.paths, scores)
        weights, _ = self.engine.state()
        deployed = self.outline.deployed
        summary = {
            "name": self.folder.name,
            "method": s.method,
            "engine": s.engine,
            "data": s.data.name,
            "samples": {k: len(self.data.split(k)) for k in ("train", "validation", "test")},
            "seed": s.seed,
            "N": self.engine.tree.N,
            "depth": self.engine.tree.depth,
            "steps": self.total_steps,
            "epochs": self.total_steps / self.per_epoch,
            "samples_seen": self.total_steps * s.batch,
            "parameters_trained": sum(v.numel() for v in weights.values()),
            "parameters_deployed": sum(
                v.numel() for k, v in weights.items() if k.split("/")[0] in deployed
            ),
            "block_applications_per_step": self.outline.applications,
            "stages": self.outline.stages(self.total_steps, self.log.optimizer.second),
            "wall_seconds": round(self.wall, 2),
            "final": {
                split: {n: self.outline.figures(v) for n, v in by_path.items()}
                for split, by_path in scores.items()
            },
            "best_validation": self.best,
            "test_by_epoch": self.outline.over_epochs(self.tests),
            "leak": self.log.leak,
            "table": table,
        }
        self.folder.write_summary(summary)
        self.log.close()
        figures.run_figures(self.folder.path, self.outline)
        if self.prober:
            self.prober.close()
        spans = self.engine.spans()
        if spans:
            timeline.write_timeline(spans, self.folder.path / "timeline.json")
            timeline.draw_waves(spans, self.folder.path / "figures" / "waves.png")
        return summary


def build_engine(settings: Settings, data: DataSet, total_steps: int) -> Engine:
    """The engine that the settings name."""
    if config.recurrent(settings):
        from treeprop_ray.through_time import engine

        return engine.build(settings, data, total_steps)
    if settings.engine == "ray":
        from treeprop_ray.engine import ray

        return ray.build(settings, data, total_steps)
    from treeprop_ray.engine import local

    return local.build(settings, data, total_steps)


def outline_of(settings: Settings, tree: Tree) -> Outline:
    """What a run reports: spine paths and the chain; backpropagation has only the chain."""
    from treeprop_ray.core.network import STEM, edge_name
    from treeprop_ray.methods.outline import Outline, layerwise, over_time

    if config.recurrent(settings):
        return over_time(settings)
    deployed = frozenset(edge_name(e) for e in (STEM, *tree.path_edges(tree.chain)))
    if settings.method == "cff":
        return layerwise(tree, deployed)
    is_tree = settings.method == "tree"
    terms = {
        n: {term: weight_of(settings, tree, n, term) for term in ("own", "right", "ce")}
        for n in tree.nodes
    }
    return Outline(
        tree=tree,
        paths=tree.named_paths if is_tree else {"full": tree.chain},
        weights={**terms, tree.N: {"ce": 1.0}},
        deployed=deployed,
        applications=block_applications(settings, tree),
        head_blocks=int(settings.model.output_block),
        perplexity=settings.model.name == "gpt",
        clean=(tree.spine_paths[-1], tree.spine[-1].n) if is_tree else None,
    )


def brief(shown: Mapping[str, str]) -> str:
    """One line of scores."""
    return "val " + "  ".join(f"{name} {text}" for name, text in shown.items())


def table_of(
    outline: Outline,
    paths: Mapping[str, Sequence[int]],
    scores: Mapping[str, Mapping[str, Score]],
) -> str:
    """Accuracy (or perplexity) of every path on every split, as plain text."""
    lines = [f"{'path':<10} {'blocks':>6}  " + "  ".join(f"{split:>10}" for split in scores)]
    if outline.perplexity:
        lines.insert(0, "perplexity = exp(mean token loss)")
    for name, path in paths.items():
        cells = "  ".join(f"{outline.show(scores[split][name]):>10}" for split in scores)
        shown = [str(i) for i in path]
        if len(shown) > 40:
            shown[3:-1] = ["…"]
        lines.append(f"{name:<10} {outline.blocks(path):>6}  {cells}   {'-'.join(shown)}")
    return "\n".join(lines)


def block_applications(settings: Settings, tree: Tree) -> int:
    """Forward applications of blocks (the head counts) in one step; each has one backward."""
    if settings.method != "tree":
        return tree.N
    from treeprop_ray.core.rule import Rule

    rule = Rule.of(settings, config.family_of(settings))
    inner = sum(not tree.is_spine(n) for n in tree.nodes.values())
    rights = inner if rule.node_weight[1] > 0 or rule.beta > 0 else 0
    heads = sum(rule.asks_head(tree, n) for n in tree.spine)
    return (len(tree.nodes) + rights + heads) * settings.mc_samples


def weight_of(settings: Settings, tree: Tree, n: int, term: str) -> float:
    """The weight with which a term of a node enters the objective."""
    if settings.method != "tree":
        return 1.0
    from treeprop_ray.core.rule import Rule

    rule = Rule.of(settings, config.family_of(settings))
    own, right = rule.node_weight
    return {"own": own, "right": right, "ce": rule.ce_weight(tree, tree.nodes[n])}[term]


def show_plan(settings: Settings) -> str:
    """What --cfg adds for the Ray engine: where every node would live on this machine."""
    if settings.engine != "ray":
        return ""
    from treeprop_ray.core.network import STEM
    from treeprop_ray.core.tree import Tree
    from treeprop_ray.data import load
    from treeprop_ray.engine import runtime
    from treeprop_ray.engine.job import plan_table
    from treeprop_ray.models import blueprint
    from treeprop_ray.schedule.placement import plan

    made = blueprint(settings, load(settings).shape)
    tree = Tree(made.N, settings.split)
    cluster = runtime.cluster_of(settings.ray)
    counts = {edge: made.count_parameters(edge) for edge in (STEM, *tree.blocks)}
    placed = plan(settings, tree, cluster, config.run_name(settings))
    table = plan_table(settings, placed, tree, counts)
    lines = [f"placement on {cluster}:", *table.splitlines()]
    return "\n".join(f"# {line}" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.train`."""
    return cli.main(__doc__ or "", Settings, config.load, run, show_plan, argv)


if __name__ == "__main__":
    sys.exit(main())
