"""method=bp engine=train: Ray Train starts the workers, each goes through the run in step.

Worker 0 writes the run folder as any other engine's run does (on several machines `out` must be a
folder that all of them see); the others compute and write nothing. A lost worker ends the run; the
same command takes it up at the last checkpoint.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeprop_ray.engine import runtime
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.schedule.placement import resources
from treeprop_ray.train import Trainer


class Leader(Trainer):
    """Worker 0; also tells Ray Train of every checkpoint."""

    def _save(self, step: int, epoch: int, scores: Mapping[str, Any], wall: float) -> None:
        super()._save(step, epoch, scores, wall)
        report({"step": step, "epoch": epoch, **{n: s.accuracy for n, s in scores.items()}})


class Follower(Trainer):
    """A worker that writes nothing."""

    def _open(self) -> None:
        pass

    def _make_log(self) -> Any:
        return _NoLog()

    def _save(self, step: int, epoch: int, scores: Mapping[str, Any], wall: float) -> None:
        report({"step": step})

    def _finish(self) -> dict[str, Any]:
        self._final_scores()
        return {}


class _NoLog:
    """Takes what a log takes."""

    loss = 0.0

    def step(self, *_: Any) -> None:
        """Nothing."""

    def epoch(self, *_: Any) -> None:
        """Nothing."""


def report(metrics: dict[str, Any]) -> None:
    """Figures for Ray Train's own records; all workers call this together."""
    import ray.train

    ray.train.report(metrics)


def worker(config: dict[str, Any]) -> None:
    """What runs in each worker; torch's process group is there."""
    from torch import distributed

    os.chdir(config["cwd"])
    (Leader if distributed.get_rank() == 0 else Follower)(config["settings"]).train()


def train(trainer: Trainer) -> dict[str, Any]:
    """Run a run to its end in workers; returns its summary."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    settings, folder = trainer.settings, trainer.folder
    owns = runtime.start(settings.ray)
    try:
        cluster = runtime.cluster()
        workers = settings.hosts or max(1, cluster.devices)
        if workers * settings.microbatches > settings.batch:
            raise UserError(f"hosts={workers}: more pieces than batch={settings.batch} samples")
        cpus, gpus = resources(settings, workers, cluster)
        folder.open()  # fresh=true is done with; workers take up what is there
        made = TorchTrainer(
            worker,
            train_loop_config={"settings": replace(settings, fresh=False), "cwd": os.getcwd()},
            torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=gpus > 0,
                resources_per_worker={"CPU": cpus, **({"GPU": gpus} if gpus else {})},
                placement_strategy=settings.strategy,
            ),
            run_config=RunConfig(name="ray_train", storage_path=str(folder.path.absolute())),
        )
        with shown(folder.path / "metrics.csv"):
            fit(made)
    finally:
        if owns:
            runtime.stop()
    summary = json.loads((folder.path / "summary.json").read_text())
    folder.write_summary(summary)  # again, from here: the command is that of this process
    return dict(summary)


def fit(made: Any) -> None:
    """TorchTrainer.fit whose errors are one line."""
    from ray.train.v2.api.exceptions import TrainingFailedError

    try:
        made.fit()
    except TrainingFailedError as e:
        failures = getattr(e, "worker_failures", {})
        for error in failures.values():
            cause = getattr(error, "_base_exc", error)
            if isinstance(cause, TrainingError | UserError):
                raise cause from None
        first = next(iter(failures.values()), e)
        text = (str(first).strip().splitlines() or [repr(first)])[-1]
        raise TrainingError(f"a worker failed: {text}") from e


@contextlib.contextmanager
def shown(metrics: Path) -> Iterator[None]:
    """Print a line for every new epoch in metrics.csv (workers print to Ray's logs)."""
    over = threading.Event()

    def follow() -> None:
        known = len(_epochs(metrics))
        while not over.wait(1.0):
            rows = _epochs(metrics)
            for row in rows[known:]:
                print(f"epoch {row['epoch']}  val full {100 * float(row['accuracy/full']):.2f} %")
            known = len(rows)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _epochs(metrics: Path) -> list[dict[str, str]]:
    if not metrics.is_file():
        return []
    with metrics.open(newline="") as f:
        return [row for row in csv.DictReader(f) if row["kind"] == "epoch" and row["accuracy/full"]]
