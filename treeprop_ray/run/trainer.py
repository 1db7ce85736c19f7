"""The loop of a run: steps, what is logged and scored, checkpoints, the summary.

Everything else that happens along a run is a callback (run/callbacks.py). The trainer knows nothing
of what a network is made of, how it is trained, or where its parts live.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from treeprop_ray import config
from treeprop_ray.config import Settings
from treeprop_ray.data import load
from treeprop_ray.data.streams import resumed
from treeprop_ray.engine import Engine, build
from treeprop_ray.errors import Terminated, TrainingError
from treeprop_ray.methods import Job, job_of
from treeprop_ray.run import checkpoint, shards
from treeprop_ray.run.callbacks import Callback, Scores, Together, callbacks_of
from treeprop_ray.run.checkpoint import Checkpoint
from treeprop_ray.run.folder import RunFolder, this_command
from treeprop_ray.run.initial import started
from treeprop_ray.run.loggers import loggers
from treeprop_ray.run.metrics import Log
from treeprop_ray.run.progress import Bar
from treeprop_ray.schedule.ops import STEP


class Trainer:
    """Takes an engine through the steps of a run; without a folder nothing is written."""

    engine: Engine
    log: Log

    def __init__(
        self,
        job: Job,
        folder: RunFolder | None = None,
        callbacks: Sequence[Callback] = (),
        writes: bool = True,
    ) -> None:
        """`writes=False`: take up the run in the folder, but write nothing (another one does)."""
        self.job, self.settings, self.folder = job, job.settings, folder
        self.writes = folder is not None and writes
        alone = folder is None  # then nobody else writes for this run
        own = loggers(job.settings, self.writes) if self.writes or alone else []
        self.callbacks = Together([*own, *callbacks])
        self.title = folder.name if folder else "fit"
        self.outline = job.method.outline(job.settings, job.tree)
        self.total_steps, self.per_epoch = job.total_steps, job.per_epoch
        self.epochs = -(-self.total_steps // self.per_epoch)  # as far as steps= lets it go
        self.start = self.done = self.epoch = 0
        self.ahead: dict[str, Any] = {"accuracy": -1.0, "epoch": 0}  # best validation, for patience
        self.stopped = ""  # why the run ends before its last step
        self.ended = False  # with a summary
        self.best: dict[str, Any] = {"accuracy": -1.0, "step": -1}
        self.tests: list[dict[str, float]] = []  # eval_test: figures of the full chain, by epoch
        self.validation: Scores = {}  # the last scores, of the time after `scored` steps
        self.scored = -1
        self.initial: dict[str, Any] = {}  # which parts came from init_from
        self.wall = 0.0
        self.saved = ""  # the last checkpoint
        self.saving: shards.Saving | None = None  # one that actors are writing
        self.after: list[Callable[[], None]] = []  # what follows it

    @classmethod
    def of(
        cls,
        settings: Settings,
        command: str | None = None,
        callbacks: Sequence[Callback] = (),
        writes: bool = True,
    ) -> Trainer:
        """The run that the settings mean; `command` is recorded in its summary."""
        folder = RunFolder(settings, command)
        data = load(settings)
        total_steps = data.total_steps(
            settings.step_samples, settings.epochs, settings.steps, settings.data.epoch_steps
        )
        every = [*callbacks_of(settings.callbacks), *callbacks]
        return cls(job_of(settings, data, total_steps), folder, every, writes)

    def finished(self) -> dict[str, Any] | None:
        """The summary of the run in the folder, if there is nothing left to do."""
        done = self.folder.summary if self.folder else None
        if done is None or done["steps"] >= self.total_steps:
            return done
        assert self.folder is not None
        same = config.load_file(self.folder.path / "config.yaml").patience == self.settings.patience
        return done if done.get("stopped") and same else None

    def train(self) -> dict[str, Any]:
        """Run to the end; returns the summary."""
        if self.folder and self.writes:
            self.folder.claim()
        try:
            return self._train()
        finally:
            if self.folder:
                self.folder.release()

    def _train(self) -> dict[str, Any]:
        point = self._newest()
        if self.settings.init_from and point is None:
            self.job, self.initial = started(self.job)
        self.saved = point.path if point else ""
        self.engine = build(self.job, self._way_on if self.folder and self.writes else None)
        try:
            self._open(point)
            self.engine.hear(partial(self.callbacks.on_notice, self))
            self.callbacks.on_start(self)
            self._began = time.perf_counter()
            epochs = (self.per_epoch, self.epochs)
            samples = self.settings.step_samples
            with Bar(self.title, self.total_steps, self.start, samples, epochs) as self.bar:
                for step in range(self.start, self.total_steps):
                    if self.stopped:
                        break
                    self._step(step)
                    if self.bar.terminated:
                        self._leave()
                if self.stopped:
                    self._stop_here()
            self.wall += time.perf_counter() - self._began
            return self._finish()
        except TrainingError as e:
            raise TrainingError(f"{e}; last checkpoint: {self.saved or 'none yet'}") from e
        except BrokenPipeError:  # who read our output has gone: no failure of the run
            raise
        except OSError as e:  # a full or lost disk
            reason = " ".join(str(e).split())
            raise TrainingError(f"{reason}; last checkpoint: {self.saved or 'none yet'}") from e
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self.saved) from None
        except Terminated:
            raise Terminated(self.saved) from None
        finally:
            try:
                self.callbacks.on_close(self)
            finally:
                self.engine.close()

    def _way_on(self) -> str:
        """What a user needs to know whose run has lost its ground."""
        assert self.folder is not None
        command = self.folder.command or this_command()
        return f"last checkpoint: {self.saved or 'none yet'}; this continues: {command}"

    def stop(self, why: str) -> None:
        """End the run after the step under way: scored, with a summary, finished."""
        self.stopped = self.stopped or why

    def _step(self, step: int) -> None:
        s, done = self.settings, step + 1
        self.done = done
        self.epoch, last = done // self.per_epoch, done == self.total_steps
        ends_epoch = done % self.per_epoch == 0 or last
        logs = ends_epoch or done % s.log_every == 0
        saves = last or (done % s.checkpoint_every == 0 if s.checkpoint_every else ends_epoch)
        clean = None
        if ends_epoch and self.outline.clean and self.job.pass_at(step) == STEP:
            clean = self.engine.clean_loss(self.outline.clean[0], step)
        self.engine.step(step, report=logs or saves)
        self._settle(wait=False)
        if logs:
            self.log.step(done, self.epoch, self.engine.reports(), clean)
        scores: Scores = {}
        if ends_epoch and (self.epoch % s.eval_every == 0 or last):
            scores = self._evaluate(done, saves)
            self._show(scores)
            self._wait(scores)
        self.callbacks.on_step(self, done)
        self.bar.advance()
        if saves:
            self._save(done, partial(self.callbacks.on_checkpoint, self, done, scores))
        if scores:
            self.callbacks.on_epoch(self, self.epoch, scores)

    def _newest(self) -> Checkpoint | None:
        """The checkpoint to go on from."""
        if self.folder is None or self.settings.fresh:
            return None
        point = checkpoint.newest(self.folder.storage)
        if point:
            checkpoint.check_fits(point, self.job.tree.N, self.settings.split)
            self.folder.identity.check(point)
        return point

    def _open(self, point: Checkpoint | None) -> None:
        """Make the folder, or take up the run that it holds."""
        if self.folder and self.writes:
            self.folder.open()
            self.folder.keep_permutation(self.job.permutation)
            if not self.job.resumes:
                print("data: a stream without a state; a resumed run starts it anew", flush=True)
        if point:
            self._resume(point)
        self.log = Log(
            self._row, self.outline, self.start, self.job.optimizer, list(self.job.metrics)
        )

    def _row(self, row: Mapping[str, Any]) -> None:
        self.callbacks.on_row(self, row)

    def _wait(self, scores: Scores) -> None:
        """Early stopping: how long no epoch has been better."""
        if scores:
            figures = self.outline.figures(scores["full"])
            if self.outline.better(figures, self.ahead):
                self.ahead = {**figures, "epoch": self.epoch}
        patience, best = self.settings.patience, self.ahead["epoch"]
        if patience and self.epoch - best >= patience:
            self.stop(f"no better validation score since epoch {best} (patience={patience})")

    def _stop_here(self) -> None:
        """Keep the state in which a run has been stopped."""
        print(f"stopped after step {self.done} of {self.total_steps}: {self.stopped}", flush=True)
        self._settle(wait=True)
        if self.folder and self.done not in checkpoint.steps(self.folder.storage):
            self._save(self.done)

    def _leave(self) -> None:
        """SIGTERM: the step is done, its state is kept, and that is all."""
        self._settle(wait=True)
        if self.folder and not self.saved.endswith(checkpoint.name_of(self.done)):
            self._save(self.done)
        self._settle(wait=True)
        raise Terminated(self.saved)

    def _resume(self, point: Checkpoint) -> None:
        N, split = self.engine.tree.N, self.settings.split
        checkpoint.check_fits(point, N, split, self.engine.shapes())
        self.start, self.best = point.meta["step"], point.meta["best"]
        self.done, self.epoch = self.start, self.start // self.per_epoch
        self.ahead = point.meta.get("ahead", {**self.ahead, "epoch": self.epoch})
        self._wait({})
        self.initial = point.meta.get("initial", {})
        self.tests = point.meta.get("tests", [])
        self.wall = point.meta["wall_seconds"]
        self._take_up(point)
        stands = f"step {self.start} of {self.total_steps}"
        if self.start > self.total_steps:
            stands = f"step {self.start}, past the {self.total_steps} steps asked for: only scored"
        print(f"continuing from {point.path} ({stands})", flush=True)

    def _take_up(self, point: Checkpoint) -> None:
        """Every actor reads its own parts, if all of them see the checkpoint."""
        engine, storage = self.engine, self.folder.storage if self.folder else None
        if engine.spread and storage is not None:
            words, each = (shards.sees, storage, self.start), range(engine.actors)
            if all(engine.guarded(lambda: engine.get([engine.ask(k, *words) for k in each]))):
                engine.take_up(partial(shards.read_own, storage, self.start), self.start)
                return
        engine.load((dict(point.weights), dict(resumed(point.optimizer))), self.start)

    def _evaluate(self, done: int, saves: bool) -> Scores:
        """Score every path on the validation split, if there is one, and log it."""
        if not self.job.splits["validation"]:
            return {}
        self.validation = scores = self.engine.score(self.outline.paths, "validation")
        self.scored = done
        self._test(done, scores, saves)
        tests = self.tests[-1] if self.settings.eval_test else {}
        self.log.epoch(done, self.epoch, scores, tests)
        return scores

    def _show(self, scores: Scores) -> None:
        """A line for the epoch; beside the bar the deployed chain and the longest short path."""
        show, short = self.outline.show, f"loss {self.log.loss:.3f}"
        now = -(-self.done // self.per_epoch)
        line = f"epoch {now}/{self.epochs}  loss {self.log.loss:.4f}"
        if scores:
            texts = [f"{name} {show(score).strip()}" for name, score in scores.items()]
            line = f"{line}  val {'  '.join(texts)}"
            names = ["full", *[name for name in scores if name != "full"][-1:]]
            short = "val " + " · ".join(f"{n} {show(scores[n], digits=1).strip()}" for n in names)
        self.bar.line(line, short)

    def _test(self, done: int, scores: Scores, saves: bool) -> None:
        """Keep the best validation score with the test score of the same weights beside it, and
        with eval_test the test score of every evaluation."""
        figures = self.outline.figures(scores["full"])
        is_best = saves and self.outline.better(figures, self.best)
        if not (is_best or self.settings.eval_test):
            return
        test: dict[str, float] = {}
        if self.job.splits["test"]:
            score = self.engine.score({"full": self.outline.paths["full"]}, "test")["full"]
            test = self.outline.figures(score)
        if is_best:
            kinds = ("accuracy", "loss")
            shown = {kind: figures[kind] for kind in kinds if kind in figures}
            self.best = {**shown, "step": done, "test": test}
        if self.settings.eval_test:
            self.tests.append({"epoch": self.epoch, **test})

    def _save(self, done: int, then: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint, or have actors begin to; `then` follows when it is there."""
        if not (self.folder and self.writes):
            then()
            return
        s = self.settings
        meta = {
            "step": done, "epoch": self.epoch, "seed": s.seed, "N": self.engine.tree.N,
            "split": s.split, "best": self.best, "tests": self.tests, "ahead": self.ahead,
            **self._origin(), "settings": self.folder.identity.computed,
            "wall_seconds": self.wall + time.perf_counter() - self._began,
        }  # fmt: skip
        best = self.best["step"] if s.keep_best else None
        marks, storage = self.folder.identity.marks(), self.folder.storage
        if self.engine.spread:
            self._settle(wait=True)
            size = 3 * sum(t.nbytes for t in self.engine.shapes().values())
            if (room := storage.room()) is not None and room < size:
                checkpoint.make_room(storage, done, s.keep_last, best, size)
            self.saving = shards.Saving(self.engine, storage, meta, marks)
            prune = partial(checkpoint.prune, storage, done, s.keep_last, best, marks)
            self.after = [prune, then]
            return
        state = self.engine.state()
        self.saved = checkpoint.keep(storage, state, meta, marks, s.keep_last, best)
        then()

    def _settle(self, wait: bool) -> None:
        """Commit the checkpoint that actors are writing, once it is whole."""
        saving = self.saving
        if saving is None or not saving.arrived(wait):
            return
        self.saving, self.saved = None, saving.commit()
        for action in self.after:
            action()

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """All of them, in this process; while the engine stands."""
        return self.engine.state()[0]

    def _cost(self) -> dict[str, Any]:
        """What the mean step costs in layers (schedule/cost.py)."""
        cost = self.job.method.cost(self.settings, self.engine.tree)
        return {"cost": {"work": cost.work, "critical_path": cost.path}} if cost else {}

    def _origin(self) -> dict[str, Any]:
        """Where the weights of the beginning came from, if not from the seed."""
        return {"initial": self.initial} if self.initial else {}

    def _finish(self) -> dict[str, Any]:
        """Test scores and the summary."""
        s, outline, tree = self.settings, self.outline, self.engine.tree
        scores = {
            split: self.validation if split == "validation" and self.scored == self.done
            else self.engine.score(outline.paths, split)
            for split in ("validation", "test")
            if self.job.splits[split]
        }  # fmt: skip
        self._settle(wait=True)
        shapes = self.engine.shapes()
        weights = shapes.values()
        deployed = [v for k, v in shapes.items() if k.split("/")[0] in outline.deployed]
        summary = {
            "name": self.folder.name if self.folder else "",
            "method": s.method,
            "engine": s.engine,
            "data": s.data.name,
            "samples": dict(self.job.sizes),
            "seed": s.seed,
            "N": tree.N,
            "depth": tree.depth,
            "steps": self.done,
            "epochs": self.done / self.per_epoch,
            "samples_seen": self.done * s.step_samples,
            "parameters_trained": sum(v.numel() for v in weights),
            "parameters_deployed": sum(v.numel() for v in deployed),
            "block_applications_per_step": outline.applications,
            "stages": self.job.method.stages(self.job),
            **self._cost(),
            "wall_seconds": round(self.wall, 2),
            "final": {
                split: {name: outline.figures(score) for name, score in by_path.items()}
                for split, by_path in scores.items()
            },
            "best_validation": self.best,
            "test_by_epoch": outline.over_epochs(self.tests),
            "leak": self.log.leak,
            "correction_ratio": self.log.ratio,
            "correction_ratios": self.log.ratios,
            "table": outline.table(outline.paths, scores),
            **({"stopped": self.stopped} if self.stopped else {}),
            **self._origin(),
        }
        if self.folder and self.folder.changes:
            summary["changes"] = self.folder.changes
        if self.folder and self.writes:
            self.folder.write_summary(summary)
        self.ended = True
        self.callbacks.on_end(self, summary)
        return summary
