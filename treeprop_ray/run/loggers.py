"""Loggers: callbacks that write a run's metrics to files (csv, TensorBoard) or to a tracker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter

from treeprop_ray.config import Settings, hidden, walk
from treeprop_ray.errors import UserError, first_line, warn
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.events import Events
from treeprop_ray.run.metrics import MetricsFile

if TYPE_CHECKING:
    from treeprop_ray.run.trainer import Trainer


def loggers(settings: Settings, folder: bool) -> list[Callback]:
    """The loggers that the settings name; those that write files need a run folder."""
    check_trackers(settings.wandb, settings.mlflow)
    files: dict[str, type[Callback]] = {"csv": Csv, "tensorboard": TensorBoard}
    chosen = [Events(), *(files[name]() for name in dict.fromkeys(settings.loggers))]
    chosen = chosen if folder else []
    chosen += [Wandb(settings.wandb)] if settings.wandb else []
    chosen += [MlFlow(settings.mlflow)] if settings.mlflow else []
    return [Besides(logger) for logger in chosen]


class Besides(Callback):
    """A logger whose trouble (a full disk, a lost tracker) is one warning: training goes on."""

    def __init__(self, logger: Callback) -> None:
        self.logger, self._warned = logger, False

    @contextlib.contextmanager
    def _spared(self) -> Iterator[None]:
        try:
            yield
        except UserError:  # asked for something that cannot be, before the first step
            raise
        except Exception as e:  # trackers have errors of their own
            if not self._warned:
                name = type(self.logger).__name__
                warn(f"{name}: {' '.join(str(e).split()) or repr(e)}; the run goes on without it")
            self._warned = True

    def on_start(self, run: Trainer) -> None:
        """The logger's."""
        with self._spared():
            self.logger.on_start(run)

    def on_row(self, run: Trainer, row: Mapping[str, Any]) -> None:
        """The logger's."""
        with self._spared():
            self.logger.on_row(run, row)

    def on_notice(self, run: Trainer, text: str) -> None:
        """The logger's."""
        with self._spared():
            self.logger.on_notice(run, text)

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        """The logger's."""
        with self._spared():
            self.logger.on_end(run, summary)

    def on_close(self, run: Trainer) -> None:
        """The logger's."""
        with self._spared():
            self.logger.on_close(run)


def check_trackers(wandb: str, mlflow: str) -> None:
    """A tracker that is asked for must be installed."""
    for name, value in (("wandb", wandb), ("mlflow", mlflow)):
        if value and find_spec(name) is None:
            raise UserError(f"{name}={value}: needs `pip install {name}`")


class Csv(Callback):
    """metrics.csv of the run folder."""

    file: MetricsFile | None = None

    def on_start(self, run: Trainer) -> None:
        """Open the file; rows after the checkpoint that the run goes on from are cut off."""
        assert run.folder is not None
        self.file = MetricsFile(run.folder.path / "metrics.csv", run.log.columns, run.start)

    def on_row(self, run: Trainer, row: Mapping[str, Any]) -> None:
        """Write it."""
        if self.file:
            self.file.write(row)

    def on_close(self, run: Trainer) -> None:
        """Close the file."""
        if self.file:
            self.file.close()


class TensorBoard(Callback):
    """tensorboard/ of the run folder."""

    board: SummaryWriter | None = None

    def on_start(self, run: Trainer) -> None:
        """Open the event file; what was written after the checkpoint is marked as void."""
        assert run.folder is not None
        purge = run.start + 1 if run.start else None
        self.board = SummaryWriter(run.folder.path / "tensorboard", purge_step=purge)

    def on_row(self, run: Trainer, row: Mapping[str, Any]) -> None:
        """Every figure under its name."""
        if self.board:
            for key, value in numbers(row).items():
                self.board.add_scalar(key, value, row["step"])

    def on_close(self, run: Trainer) -> None:
        """Close the file."""
        if self.board:
            self.board.close()


class Wandb(Callback):
    """A run of a Weights & Biases project, with settings, metrics and final scores."""

    def __init__(self, project: str) -> None:
        self.project, self.run = project, None

    def on_start(self, run: Trainer) -> None:
        """Begin a run there; its group is the folder of runs (of a sweep, the sweep)."""
        import wandb

        try:
            self.run = wandb.init(
                project=self.project,
                name=run.title,
                group=Path(run.settings.out).name,
                config=plain(run.settings),
                dir=str(run.folder.path) if run.folder else None,
            )
        except Exception as e:  # of its own kinds: no key, no network, a bad name
            raise UserError(f"wandb={self.project}: {first_line(e)}") from e

    def on_row(self, run: Trainer, row: Mapping[str, Any]) -> None:
        """Every figure under its name."""
        if self.run is not None:
            self.run.log({"epoch": row["epoch"], **numbers(row)}, step=row["step"])

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        """The final scores."""
        if self.run is not None:
            self.run.summary.update(final(summary))

    def on_close(self, run: Trainer) -> None:
        """End the run there."""
        if self.run is not None:
            self.run.finish(exit_code=0 if run.ended else 1)


class MlFlow(Callback):
    """A run of an MLflow server or folder, in the experiment named like the folder of runs."""

    def __init__(self, uri: str) -> None:
        self.uri, self.id = uri, ""

    def on_start(self, run: Trainer) -> None:
        """Begin a run there."""
        import mlflow

        try:
            self.client = mlflow.MlflowClient(self.uri)
            name = Path(run.settings.out).name
            known = self.client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self.client.create_experiment(name)
            self.id = self.client.create_run(experiment, run_name=run.title).info.run_id
            params = [mlflow.entities.Param(k, str(v)) for k, v in plain(run.settings).items()]
            for some in batched(params, 100):  # as many as it takes at once
                self.client.log_batch(self.id, params=some)
        except Exception as e:
            raise UserError(f"mlflow={hidden(self.uri)}: {hidden(first_line(e))}") from e

    def on_row(self, run: Trainer, row: Mapping[str, Any]) -> None:
        """Every figure under its name."""
        self._log(numbers(row), row["step"])

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        """The final scores."""
        self._log(final(summary), 0)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        """In as few requests as there may be: each is a transaction of the tracker's."""
        import mlflow

        now = int(1000 * time.time())
        metrics = [mlflow.entities.Metric(k, float(v), now, step) for k, v in figures.items()]
        for some in batched(metrics, 1000):
            self.client.log_batch(self.id, metrics=some)

    def on_close(self, run: Trainer) -> None:
        """End the run there."""
        if self.id:
            self.client.set_terminated(self.id, "FINISHED" if run.ended else "FAILED")


def batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Runs of at most so many."""
    return (items[start : start + size] for start in range(0, len(items), size))


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row."""
    return {key: value for key, value in row.items() if isinstance(value, float)}


def plain(settings: Settings) -> dict[str, Any]:
    """The settings by their dotted keys."""
    return {key: hidden(value) for key, _, value in walk(settings)}


def final(summary: Mapping[str, Any]) -> dict[str, float]:
    """The final scores as final/<split>/<path>/<kind>."""
    return {
        f"final/{split}/{path}/{kind}": value
        for split, by_path in summary["final"].items()
        for path, figures in by_path.items()
        for kind, value in figures.items()
    }
