"""method=bp engine=train: Ray Train starts the workers, each goes through the run in step.

Worker 0 writes the run folder as any other engine's run does (on several machines `out` must be a
folder that all of them see); the others compute and write nothing. A lost worker ends the run; the
same command takes it up at the last checkpoint.
"""

from __future__ import annotations

import contextlib
import csv
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2.api.exceptions import TrainingFailedError
from torch import distributed

from treeprop_ray.core import devices
from treeprop_ray.engine import runtime
from treeprop_ray.errors import TrainingError, UserError
from treeprop_ray.run.callbacks import Callback, Scores
from treeprop_ray.run.folder import read_summary
from treeprop_ray.run.trainer import Trainer
from treeprop_ray.schedule.cluster import resources


class Report(Callback):
    """Figures for Ray Train's own records; all workers report together."""

    def on_checkpoint(self, run: Trainer, done: int, scores: Scores) -> None:
        shown = {name: run.outline.score(score) for name, score in scores.items()}
        ray.train.report({"step": done, "epoch": run.epoch, **shown})


class Workers(TorchTrainer):  # type: ignore[misc]
    """TorchTrainer without the actor that frees the workers' places when their controller is gone.

    That actor asks whichever Ray it finds on this machine: beside a second one it takes the
    controller for dead and ends the workers. The places go with the controller in any case.
    """

    def _create_default_callbacks(self) -> list[Any]:
        every = super()._create_default_callbacks()
        return [c for c in every if not isinstance(c, PlacementGroupCleanerCallback)]


def worker(config: dict[str, Any]) -> None:
    """What runs in each worker; torch's process group is there."""
    os.chdir(config["cwd"])
    leads = distributed.get_rank() == 0
    callbacks = [Report(), *(config["callbacks"] if leads else [])]
    Trainer.of(config["settings"], callbacks=callbacks, writes=leads).train()


def train_in_workers(trainer: Trainer, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Run a run to its end in workers; `callbacks` are the first worker's. Returns its summary."""
    settings, folder = trainer.settings, trainer.folder
    assert folder is not None
    owns = runtime.start(settings.ray)
    try:
        cluster = runtime.cluster()
        workers = settings.hosts or max(1, cluster.devices)
        if workers * settings.pieces > settings.step_samples:
            raise UserError(f"hosts={workers}: more pieces than batch={settings.batch} samples")
        cpus, gpus = resources(settings, workers, cluster)
        folder.open()  # fresh=true is done with; workers take up what is there
        folder.release()  # the first worker writes
        torch_trainer = Workers(
            worker,
            train_loop_config={
                "settings": replace(settings, fresh=False),
                "cwd": os.getcwd(),
                "callbacks": list(callbacks),
            },
            torch_config=TorchConfig(backend=devices.gpus.backend if gpus else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=gpus > 0,
                resources_per_worker={"CPU": cpus, **({"GPU": gpus} if gpus else {})},
                placement_strategy=settings.strategy,
            ),
            run_config=RunConfig(name="ray_train", storage_path=str(folder.path.absolute())),
        )
        with shown(folder.path / "metrics.csv"):
            fit(torch_trainer)
    finally:
        if owns:
            runtime.stop()
    summary = read_summary(folder.path)
    folder.write_summary(summary)  # again, from here: the command is that of this process
    return dict(summary)


def fit(trainer: TorchTrainer) -> None:
    """TorchTrainer.fit whose errors are one line."""
    try:
        trainer.fit()
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
                judged = row["accuracy/full"]
                loss = f"{float(row['val_loss/full']):.4g}"
                shown = f"{100 * float(judged):.2f} %" if judged else loss
                print(f"epoch {row['epoch']}  val full {shown}")
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
        return [row for row in csv.DictReader(f) if row["kind"] == "epoch" and row["val_loss/full"]]
