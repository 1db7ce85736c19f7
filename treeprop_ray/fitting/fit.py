"""Train your own blocks from Python: `fit(network, data, epochs=20)`, the train command's twin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from omegaconf import OmegaConf

from treeprop_ray import config, methods
from treeprop_ray.config import OWN, Settings
from treeprop_ray.core.inputs import Inputs, Unpacks
from treeprop_ray.core.network import TreeNetwork, named, part_state
from treeprop_ray.core.rule import LossRule
from treeprop_ray.core.scoring import Metric, check_name
from treeprop_ray.data.own import columns_of, own_set
from treeprop_ray.data.sources import Split
from treeprop_ray.data.streams import batch_of
from treeprop_ray.errors import UserError
from treeprop_ray.models.pretrained import TreeNetwork as Pretrained
from treeprop_ray.reporting.callbacks import standard
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.folder import RunFolder
from treeprop_ray.run.trainer import Trainer

WIDE = {"float32", "float64"}  # precisions that are those of the weights themselves
HALF = {"bfloat16": "bf16", "float16": "fp16"}
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
    with `train`, `validation` and `test`. Several tensors in a sample are a dict or a tuple of
    them before the label, or more `columns`, of which the last is the label's: the stem then gets a
    dict or a tuple. `validation=` and `test=` take the same kinds. A stream
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
    if not isinstance(network, TreeNetwork):
        kind = type(network).__name__
        raise UserError(f"network: is a {kind}; make a TreeNetwork, by from_blocks or the like")
    splits = splits_of(data, y, validation, test)
    if own_batch := batch_of(splits["train"]):
        settings.setdefault("batch", own_batch)
    chosen = read_settings(network, settings, epoch_steps)
    check_own(callbacks, metrics or {}, splits)
    needs = {
        "probe": "validation", "eval_every": "validation", "eval_test": "test",
        "patience": "validation",
    }  # fmt: skip
    for key, split in needs.items():
        if key in settings and splits[split] is None:
            raise UserError(f"{key}={settings[key]}: needs {split}=(x, y)")
    count = chosen.step_samples
    joined, loss = count // chosen.batch, LossRule.of(chosen)
    samples = own_set(splits, columns_of("columns", columns), count, joined=joined, loss=loss)
    samples = replace(samples, dtype=dtype_of(network, samples.dtype))
    inputs = samples.shape.form
    network.reads(inputs)
    if isinstance(network, Pretrained):
        seen = samples.train if isinstance(samples.train, Split) else samples.example
        network.check_samples(inputs.unpack(seen.x) if inputs else seen.x, seen.y)
    steps = samples.total_steps(count, chosen.epochs, chosen.steps, epoch_steps)
    job = methods.job_over(network, chosen, samples, steps, metrics)
    folder = RunFolder(chosen) if "name" in settings or "out" in settings else None
    own = [*(standard(chosen) if folder else []), _Fetch()]
    trainer = Trainer(job, folder, [*own, *callbacks])
    with as_before(network, inputs):
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


@contextmanager
def as_before(network: TreeNetwork, inputs: Inputs | None = None) -> Iterator[None]:
    """Have the stem unpack several inputs, and put back what a run changes besides weights:
    `freeze` is for this call alone, so is the mode (a block's dropout) and the threads, and the
    caller's own draws go on where they were."""
    trains = [(p, p.requires_grad) for p in network.parameters()]
    modes = [(module, module.training) for module in network.modules()]
    drawn, threads = torch.get_rng_state(), torch.get_num_threads()
    hook = network.stem.register_forward_pre_hook(Unpacks(inputs)) if inputs else None
    try:
        yield
    finally:
        if hook:
            hook.remove()
        torch.set_rng_state(drawn)
        torch.set_num_threads(threads)
        for p, trained in trains:
            p.requires_grad_(trained)
        for module, mode in modes:
            module.training = mode


def dtype_of(network: TreeNetwork, other: torch.dtype) -> torch.dtype:
    """The floats of a network, which its inputs are made; `other` where it has none."""
    floats = (p.dtype for p in network.parameters() if p.is_floating_point())
    return next(floats, other)


def check_own(
    callbacks: Sequence[Any], metrics: Mapping[str, Metric], splits: Mapping[str, Any]
) -> None:
    """Raise UserError where the user's callbacks and metrics cannot be used."""
    if not isinstance(callbacks, Sequence):
        raise UserError("callbacks: a list such as [callback]")
    if not isinstance(metrics, Mapping):
        raise UserError('metrics: a dict such as {"name": function}')
    for callback in callbacks:
        if not isinstance(callback, Callback):
            kind = type(callback).__name__
            raise UserError(f"callbacks: {kind} is no treeprop_ray.Callback; make it a subclass")
    for name in metrics:
        check_name(name)
    if metrics and splits["validation"] is None and splits["test"] is None:
        raise UserError(f"metrics={', '.join(metrics)}: needs validation=(x, y) or test=(x, y)")


def splits_of(data: Any, y: Any, validation: Any, test: Any) -> dict[str, Any]:
    """What was given for each split."""
    splits = dict(data) if isinstance(data, Mapping) and y is None else {"train": data}
    if y is not None:
        splits["train"] = (data, y)
    for name, given in (("validation", validation), ("test", test)):
        if given is not None and name in splits:
            raise UserError(f"{name}=…: data has a split {name} already")
        splits.setdefault(name, given)
    return {"train": None, **splits}


def plain(key: str, value: Any) -> Any:
    """A value of a setting as configuration takes it: numbers of numpy and torch are numbers."""
    if isinstance(value, Mapping):
        return {k: plain(f"{key}.{k}", v) for k, v in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [plain(key, v) for v in value]
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise UserError(f'{key}={name}: give its name, {key}="package.module:{name}"')
    if not (value is None or isinstance(value, bool | int | float | str | Path)):
        raise UserError(f"{key}: a number, a word or a list, not {type(value).__name__}")
    return value


def read_settings(network: TreeNetwork, given: Mapping[str, Any], epoch_steps: int = 0) -> Settings:
    """Keywords to checked settings; what the network says, or what needs a folder, is refused."""
    given = {key: plain(key, value) for key, value in given.items()}
    for key, value in given.items():
        root = key.partition(".")[0]
        if root in GIVEN:
            raise UserError(f"{key}={value}: not for fit; the network and the data say it")
        if root in FOLDER and not {"name", "out"} & given.keys():
            raise UserError(f"{key}={value}: needs a run folder; give name=… too")
        if root == "cff" and given.get("method") != "cff":
            raise UserError(f"{key}={value}: needs method=cff")
    held = str(dtype_of(network, torch.float32)).removeprefix("torch.")
    if held in HALF and any(p.requires_grad for p in network.parameters()):
        raise UserError(
            f"network: its weights are {held}, in which small steps are lost; train it as "
            f"network.float(), with precision={HALF[held]} if you like"
        )
    if given.get("precision", held) in WIDE - {held}:
        wanted = {"float32": "float()", "float64": "double()"}[given["precision"]]
        raise UserError(
            f"precision={given['precision']}: the network's weights are {held}; network.{wanted}"
        )
    if given.get("engine") == "train":
        raise UserError("engine=train: belongs to the train command; fit has local and ray")
    own = {
        "experiment": "fit", "model": {"name": OWN},
        "data": {"name": OWN, "epoch_steps": epoch_steps},
        "family": network.family, "split": network.tree.split,
    }  # fmt: skip
    merged = config.merge(Settings, ("", OmegaConf.create({**own, **given})))
    return methods.checked(cast(Settings, merged))
