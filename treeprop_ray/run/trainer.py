"""The loop of a run: steps, and when one is logged, scored, and kept.

What scores mean is in judging.py, how the state is kept in keeping.py, the summary in summary.py;
everything else that happens along a run is a callback (callbacks.py). The trainer knows nothing of
what a network is made of, how it is trained, or where its parts live.
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
from treeprop_ray.engine import Engine, build
from treeprop_ray.errors import Terminated
from treeprop_ray.methods import Job, job_of
from treeprop_ray.run import checkpoint
from treeprop_ray.run.callbacks import Callback, Scores, Together, callbacks_of
from treeprop_ray.run.checkpoint import Checkpoint
from treeprop_ray.run.folder import RunFolder
from treeprop_ray.run.initial import started
from treeprop_ray.run.judging import Judge
from treeprop_ray.run.keeping import Keeper
from treeprop_ray.run.loggers import loggers
from treeprop_ray.run.metrics import Log
from treeprop_ray.run.progress import Bar, standing
from treeprop_ray.run.summary import summary_of
from treeprop_ray.schedule.ops import STEP


class Trainer:
    """Takes an engine through the steps of a run; without a folder nothing is written.

    A callback finds here `settings`, `outline` (the paths by name), `engine` and `log` (from
    `on_start` on), `folder` (None in a `fit` without a name), `start`, `done` and `total_steps`
    (steps), `epoch` and `epochs`, `validation` (the last scores), and may call `stop`.
    """

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
        self.stopped = ""  # why the run ends before its last step
        self.ended = False  # with a summary
        self.initial: dict[str, Any] = {}  # which parts came from init_from
        self.wall = 0.0  # seconds, of earlier processes too
        self.judge = Judge(job.settings, self.outline)
        self.keeper = Keeper(job.settings, folder)

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
        point = self.keeper.newest(self.job.tree.N)
        if self.settings.init_from and point is None:
            self.job, self.initial = started(self.job)
        self.engine = build(self.job, self.keeper.way_on if self.writes else None)
        try:
            with self.keeper.named_in_errors():
                self._open(point)
                self._loop()
                return self._finish()
        finally:
            try:
                self.callbacks.on_close(self)
            finally:
                self.engine.close()

    def _loop(self) -> None:
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
        self.keeper.settle(wait=False)
        if logs:
            self.log.step(done, self.epoch, self.engine.reports(), clean)
        scores: Scores = {}
        if ends_epoch and (self.epoch % s.eval_every == 0 or last):
            scores = self._evaluate(saves)
        self.callbacks.on_step(self, done)
        self.bar.advance()
        if saves:
            self._save(partial(self.callbacks.on_checkpoint, self, done, scores))
        if scores:
            self.callbacks.on_epoch(self, self.epoch, scores)

    def stop(self, why: str) -> None:
        """End the run after the step under way: scored, with a summary, finished."""
        self.stopped = self.stopped or why

    def _evaluate(self, saves: bool) -> Scores:
        """Score, log and show an epoch; is it the last one?"""
        scores = self.judge.evaluate(self.engine, self.done, self.epoch, saves)
        if scores:
            self.log.epoch(self.done, self.epoch, scores, self.judge.last_test)
        now = -(-self.done // self.per_epoch)
        self.bar.line(*standing(f"epoch {now}/{self.epochs}", self.log.loss, scores, self.outline))
        self.stop(self.judge.out_of_patience(self.epoch))
        return scores

    # -- the beginning ------------------------------------------------------------------------

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

    def _resume(self, point: Checkpoint) -> None:
        checkpoint.check_fits(point, self.engine.tree.N, self.settings.split, self.engine.shapes())
        self.start = self.done = point.meta["step"]
        self.epoch = self.start // self.per_epoch
        self.judge.take_up(point.meta, self.epoch)
        self.stop(self.judge.out_of_patience(self.epoch))
        self.initial = point.meta.get("initial", {})
        self.wall = point.meta["wall_seconds"]
        self.keeper.take_up(self.engine, point)
        stands = f"step {self.start} of {self.total_steps}"
        if self.start > self.total_steps:
            stands = f"step {self.start}, past the {self.total_steps} steps asked for: only scored"
        print(f"continuing from {point.path} ({stands})", flush=True)

    # -- what is kept -------------------------------------------------------------------------

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """All of them, in this process; while the engine stands."""
        return self.engine.state()[0]

    @property
    def origin(self) -> dict[str, Any]:
        """Where the weights of the beginning came from, if not from the seed."""
        return {"initial": self.initial} if self.initial else {}

    def _save(self, then: Callable[[], None] = lambda: None) -> None:
        """Keep the state as it is; `then` follows when it is kept, or would be."""
        if not (self.folder and self.writes):
            then()
            return
        meta = {
            "step": self.done, "epoch": self.epoch, "seed": self.settings.seed,
            "N": self.engine.tree.N, "split": self.settings.split, **self.judge.state(),
            **self.origin, "settings": self.folder.identity.computed,
            "wall_seconds": self.wall + time.perf_counter() - self._began,
        }  # fmt: skip
        self.keeper.save(self.engine, meta, then)

    # -- the end ------------------------------------------------------------------------------

    def _stop_here(self) -> None:
        """Keep the state in which a run has been stopped."""
        print(f"stopped after step {self.done} of {self.total_steps}: {self.stopped}", flush=True)
        self.keeper.settle(wait=True)
        if not self.keeper.has(self.done):
            self._save()

    def _leave(self) -> None:
        """SIGTERM: the step is done, its state is kept, and that is all."""
        self.keeper.settle(wait=True)
        if not self.keeper.last.endswith(checkpoint.name_of(self.done)):
            self._save()
        self.keeper.settle(wait=True)
        raise Terminated(self.keeper.last)

    def _finish(self) -> dict[str, Any]:
        """Test scores and the summary."""
        scores = self.judge.final(self.engine, self.done)
        self.keeper.settle(wait=True)
        summary = summary_of(self, scores)
        if self.folder and self.writes:
            self.folder.write_summary(summary)
        self.ended = True
        self.callbacks.on_end(self, summary)
        return summary
