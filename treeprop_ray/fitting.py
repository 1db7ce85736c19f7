"""Train your own blocks from Python: `fit(network, x, y, epochs=20)`, the train command's twin."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from omegaconf import OmegaConf
from torch import Tensor

from treeprop_ray import config, methods
from treeprop_ray.config import OWN, Settings
from treeprop_ray.core.network import TreeNetwork, named, part_state
from treeprop_ray.data.sets import DataSet, Split
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.callbacks import standard
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.folder import RunFolder
from treeprop_ray.run.trainer import Trainer

GIVEN = {"experiment", "model", "data", "time", "split", "family"}  # by network, x and y
FOLDER = {
    "fresh", "storage", "checkpoint_every", "keep_last", "keep_best", "probe",
    "timeline_steps", "loggers",
}  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """What `fit` gives back."""

    network: TreeNetwork  # trained, on the CPU
    history: pd.DataFrame  # the rows of metrics: kind (step or epoch), step, epoch, losses, scores
    scores: Mapping[str, Mapping[str, Mapping[str, float]]]  # split -> path -> loss, accuracy
    paths: Mapping[str, Sequence[int]]  # the paths by name, `full` is the whole chain
    folder: Path | None  # the run folder, with name= or out=
    summary: Mapping[str, Any]  # what summary.json of a run folder holds


def fit(
    network: TreeNetwork,
    x: Tensor,
    y: Tensor,
    *,
    validation: tuple[Tensor, Tensor] | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Fitted:
    """Train `network` in place on inputs x (n, …) and integer labels y (n, …); see `Fitted`.

    Keywords are the settings of the train command (`epochs=20, lr=3e-4, alpha=1.0, beta=0.5,
    sigma=0.005, objective="node_all_ce", …`); nested ones as `weights={"right": 0.5}`. An epoch
    goes once through the samples in a new order, less an incomplete last batch. `name=` (or `out=`)
    asks for a run folder with checkpoints, metrics and figures; the same call then continues.
    With `validation=(x, y)` every path is scored after each epoch, with `test` at the end.
    """
    chosen = read_settings(network, settings)
    needs = {
        "probe": validation, "eval_every": validation, "eval_test": test, "patience": validation,
    }  # fmt: skip
    for key, pair in needs.items():
        if key in settings and pair is None:
            split = "test" if key == "eval_test" else "validation"
            raise UserError(f"{key}={settings[key]}: needs {split}=(x, y)")
    data = data_of(x, y, validation, test)
    steps = chosen.epochs * data.steps_per_epoch(chosen.batch)
    job = methods.job_over(network, chosen, data, min(chosen.steps or sys.maxsize, steps))
    folder = RunFolder(chosen) if "name" in settings or "out" in settings else None
    trainer = Trainer(job, folder, [*(standard(chosen) if folder else []), *callbacks])
    summary = trainer.train()
    for name, module in named(network.cpu().parts()).items():
        if mine := part_state(trainer.weights, name):  # backpropagation has no auxiliary blocks
            module.load_state_dict(mine)
    return fitted(network, trainer, summary)


def fitted(network: TreeNetwork, trainer: Trainer, summary: Mapping[str, Any]) -> Fitted:
    """The result of a run that is over."""
    folder = trainer.folder.path if trainer.folder else None
    history = pd.DataFrame(trainer.log.rows, columns=trainer.log.columns)
    if folder and "csv" in trainer.settings.loggers:  # there earlier parts of the run are too
        history = pd.read_csv(folder / "metrics.csv")
    return Fitted(network, history, summary["final"], trainer.outline.paths, folder, summary)


def data_of(
    x: Tensor,
    y: Tensor,
    validation: tuple[Tensor, Tensor] | None,
    test: tuple[Tensor, Tensor] | None,
) -> DataSet:
    """The samples as a data set; a split that was not given is empty."""

    def split(name: str, pair: tuple[Tensor, Tensor] | None) -> Split:
        inputs, labels = pair or (x[:0], y[:0])
        if len(inputs) != len(labels):
            raise UserError(
                f"{name}x has {len(inputs)} samples, {name}y has {len(labels)} labels; must be the "
                "same number"
            )
        return Split(inputs, labels)

    train, held, tested = split("", (x, y)), split("validation ", validation), split("test ", test)
    classes = int(y.max()) + 1
    return DataSet("own", train, held, tested, classes, torch.Tensor.clone, x.dtype)


def read_settings(network: TreeNetwork, given: Mapping[str, Any]) -> Settings:
    """Keywords to checked settings; what the network says, or what needs a folder, is refused."""
    for key, value in given.items():
        root = key.partition(".")[0]
        if root in GIVEN:
            raise UserError(f"{key}={value}: not for fit; the network, x and y say it")
        if root in FOLDER and not {"name", "out"} & given.keys():
            raise UserError(f"{key}={value}: needs a run folder; give name=… too")
        if root == "cff" and given.get("method") != "cff":
            raise UserError(f"{key}={value}: needs method=cff")
    if given.get("engine") == "train":
        raise UserError("engine=train: belongs to the train command; fit has local and ray")
    own = {
        "experiment": "fit", "model": {"name": OWN}, "data": {"name": OWN},
        "family": network.family, "split": network.tree.split,
    }  # fmt: skip
    merged = config.merge(Settings, ("", OmegaConf.create({**own, **given})))
    return methods.checked(cast(Settings, merged))
