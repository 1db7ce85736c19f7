"""Train your own blocks from Python: `fit(network, data, epochs=20)`, the train command's twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from treeprop_ray import config, methods
from treeprop_ray.config import OWN, Settings
from treeprop_ray.core.network import TreeNetwork, named, part_state
from treeprop_ray.core.scoring import Metric
from treeprop_ray.data.own import columns_of, own_set
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.callbacks import standard
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.folder import RunFolder
from treeprop_ray.run.trainer import Trainer

GIVEN = {"experiment", "model", "data", "time", "split", "family"}  # by network and data
FOLDER = {
    "fresh", "storage", "checkpoint_every", "keep_last", "keep_best", "probe",
    "timeline_steps", "loggers",
}  # fmt: skip


class _Fetch(Callback):
    """Brings the weights here while the actors still live."""

    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        run.weights  # noqa: B018 (kept there)


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
    data: Any,
    y: Any = None,
    *,
    validation: Any = None,
    test: Any = None,
    columns: Sequence[str] | str | None = None,
    epoch_steps: int = 0,
    callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, Metric] | None = None,
    **settings: Any,
) -> Fitted:
    """Train `network` in place on its data; see `Fitted`.

    `data` is inputs x (n, …) with integer labels y (n, …), as tensors or arrays; or a torch
    Dataset, IterableDataset or DataLoader, a Hugging Face Dataset or IterableDataset, or a
    `ray.data.Dataset`, of pairs (input, label) or with the names of two `columns`; or a mapping
    with `train`, `validation` and `test`. `validation=` and `test=` take the same kinds. A stream
    is read in its own order, and one without a length needs `steps=`, or `epoch_steps=`, the steps
    that count as an epoch.

    Keywords are the settings of the train command (`epochs=20, lr=3e-4, alpha=1.0, beta=0.5,
    sigma=0.005, objective="node_all_ce", …`); nested ones as `weights={"right": 0.5}`. An epoch
    goes once through the samples in a new order, less an incomplete last batch. `name=` (or `out=`)
    asks for a run folder with checkpoints, metrics and figures; the same call then continues.
    With `validation=` every path is scored after each epoch, with `test` at the end.
    `metrics={"name": function(outputs, targets) or an object of torchmetrics}` are scored beside
    the loss (`loss="mse"`, `loss={"label_smoothing": 0.1}`, `loss="package.module:function"`).
    """
    splits = splits_of(data, y, validation, test)
    loader = splits["train"]
    if isinstance(loader, DataLoader) and loader.batch_size and "batch" not in settings:
        settings["batch"] = loader.batch_size
    chosen = read_settings(network, settings, epoch_steps)
    if metrics and splits["validation"] is None and splits["test"] is None:
        raise UserError(f"metrics={', '.join(metrics)}: needs validation=(x, y) or test=(x, y)")
    needs = {
        "probe": "validation", "eval_every": "validation", "eval_test": "test",
        "patience": "validation",
    }  # fmt: skip
    for key, split in needs.items():
        if key in settings and splits[split] is None:
            raise UserError(f"{key}={settings[key]}: needs {split}=(x, y)")
    count = chosen.step_samples
    samples = own_set(splits, columns_of("columns", columns), count, joined=count // chosen.batch)
    steps = samples.total_steps(count, chosen.epochs, chosen.steps, epoch_steps)
    job = methods.job_over(network, chosen, samples, steps, metrics)
    folder = RunFolder(chosen) if "name" in settings or "out" in settings else None
    own = [*(standard(chosen) if folder else []), _Fetch()]
    trainer = Trainer(job, folder, [*own, *callbacks])
    trains = [(p, p.requires_grad) for p in network.parameters()]
    try:
        summary = trainer.train()
    finally:
        for p, mode in trains:  # `freeze` is for this call alone
            p.requires_grad_(mode)
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


def splits_of(data: Any, y: Any, validation: Any, test: Any) -> dict[str, Any]:
    """What was given for each split."""
    splits = dict(data) if isinstance(data, Mapping) else {"train": data}
    if y is not None:
        splits["train"] = (data, y)
    for name, given in (("validation", validation), ("test", test)):
        if given is not None and name in splits:
            raise UserError(f"{name}=…: data has a split {name} already")
        splits.setdefault(name, given)
    return {"train": None, **splits}


def read_settings(network: TreeNetwork, given: Mapping[str, Any], epoch_steps: int = 0) -> Settings:
    """Keywords to checked settings; what the network says, or what needs a folder, is refused."""
    for key, value in given.items():
        root = key.partition(".")[0]
        if root in GIVEN:
            raise UserError(f"{key}={value}: not for fit; the network and the data say it")
        if root in FOLDER and not {"name", "out"} & given.keys():
            raise UserError(f"{key}={value}: needs a run folder; give name=… too")
        if root == "cff" and given.get("method") != "cff":
            raise UserError(f"{key}={value}: needs method=cff")
    if given.get("engine") == "train":
        raise UserError("engine=train: belongs to the train command; fit has local and ray")
    own = {
        "experiment": "fit", "model": {"name": OWN},
        "data": {"name": OWN, "epoch_steps": epoch_steps},
        "family": network.family, "split": network.tree.split,
    }  # fmt: skip
    merged = config.merge(Settings, ("", OmegaConf.create({**own, **given})))
    return methods.checked(cast(Settings, merged))
