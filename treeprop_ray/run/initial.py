"""init_from: a run that starts from the weights of another one, part by part.

The driver compares names and shapes; each host then reads the tensors of its own parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from treeprop_ray.config import is_remote
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError, first_line
from treeprop_ray.methods import Job
from treeprop_ray.methods.job import Parts
from treeprop_ray.run import checkpoint
from treeprop_ray.run.files import read_json
from treeprop_ray.run.folder import checkpoints_of, run_settings
from treeprop_ray.run.storage import Storage, storage_at
from treeprop_ray.run.tensors import Tensors

EXPORTED = "model.safetensors"
Keys = Mapping[str, Mapping[str, str]]  # part -> its tensor -> the tensor's name in the file
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """A file of weights, in a checkpoint or in a folder that export wrote."""

    given: str
    storage: Storage
    name: str
    file: str = ""  # of an export
    end: int = 0  # exported: where its path ends; the edge that ends there is the head

    @contextlib.contextmanager
    def open(self) -> Iterator[Tensors]:
        """The tensors, which are read one by one."""
        try:
            with self.storage.get(self.name) as folder:
                kinds = ("weights.safetensors", "weights-*.safetensors")
                files = [path for kind in kinds for path in sorted(folder.glob(kind))]
                yield Tensors([folder / self.file] if self.file else files)
        except (OSError, SafetensorError) as e:
            raise UserError(f"init_from={self.given}: cannot be read: {first_line(e)}") from e

    def contents(self, tree: Tree) -> tuple[Keys, Mapping[str, Shapes]]:
        """Names and shapes of the tensors, by part."""
        keys: dict[str, dict[str, str]] = {}
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        head = f"{tree.head[0]}-{tree.head[1]}"
        with self.open() as weights:
            for key in weights:
                part, _, tensor = key.partition("." if self.file == EXPORTED else "/")
                if self.end == tree.N and part.endswith(f"-{self.end}"):
                    part = head
                keys.setdefault(part, {})[tensor] = key
                shapes.setdefault(part, {})[tensor] = weights.shape(key)
        return keys, shapes


def source_of(given: str) -> Source:
    """What `init_from` names."""
    if "://" in given:
        parent, _, name = given.rstrip("/").rpartition("/")
        return Source(given, storage_at(parent), name)
    path = Path(given).resolve()
    if (path / "config.yaml").is_file():
        of_run = run_settings(str(path))
        if is_remote(of_run.storage):
            raise UserError(
                f"init_from={given}: its checkpoints are at {of_run.storage}, which a file says; "
                f"give the address itself: init_from={of_run.storage}/{path.name}/step-…"
            )
        storage = checkpoints_of(of_run, path)
        point = checkpoint.newest(storage)
        if point is None:
            raise UserError(f"init_from={given}: the run has no checkpoint")
        return Source(given, storage, checkpoint.name_of(point.meta["step"]))
    if any(path.glob("weights*.safetensors")):
        return Source(given, storage_at(path.parent), path.name)
    if (path / EXPORTED).is_file() and (path / "model.json").is_file():
        listed = read_json(path / "model.json", "path")["path"]
        if not isinstance(listed, list) or not listed or not isinstance(listed[-1], int):
            raise UserError(f"{path / 'model.json'}: is damaged: path must be a list of numbers")
        ends = listed[-1]
        return Source(given, storage_at(path.parent), path.name, EXPORTED, ends)
    raise UserError(
        f"init_from={given}: must be a run folder, a checkpoint (…/checkpoints/step-…) or a folder "
        "that export wrote"
    )


def started(job: Job) -> tuple[Job, dict[str, Any]]:
    """The job whose parts begin with the weights that `init_from` names, and what to record."""
    settings, names = job.settings, job.method.all_parts(job.settings, job.tree)
    source = source_of(settings.init_from)
    keys, theirs = source.contents(job.tree)
    misfits = {
        name: reason
        for name, ours in _shapes(job.parts, names).items()
        if (reason := _misfit(ours, theirs.get(name)))
    }
    taken = [name for name in names if name in keys and name not in misfits]
    if misfits and (settings.init_strict or not taken):
        name, reason = next(iter(misfits.items()))
        more = f" (and {len(misfits) - 1} more parts)" if len(misfits) > 1 else ""
        hint = "; init_strict=false lets them start fresh" if taken else ""
        raise UserError(f"init_from={settings.init_from}: part {name}: {reason}{more}{hint}")
    print(f"starting from {source.storage.at(source.name)}: {len(taken)} parts", end="", flush=True)
    print(f"; fresh: {', '.join(misfits)}" if misfits else "", flush=True)
    record = {"from": source.storage.at(source.name), "parts": taken, "fresh": list(misfits)}
    mine = {name: keys[name] for name in taken}
    return replace(job, parts=partial(_loaded, job.parts, source, mine)), record


def _loaded(parts: Parts, source: Source, keys: Keys, names: Sequence[str]) -> dict[str, nn.Module]:
    """The parts of a host with the weights of the source."""
    modules = parts(names)
    mine = [name for name in names if name in keys]
    if mine:
        with source.open() as weights:
            for name in mine:
                tensors = {own: weights[key] for own, key in keys[name].items()}
                modules[name].load_state_dict(tensors)
    return modules


def _shapes(parts: Parts, names: Sequence[str]) -> dict[str, Shapes]:
    """Shapes of the own parts; nothing is allocated where the network allows it."""
    try:
        with torch.device("meta"):
            modules = parts(names)
    except Exception:  # the user's own factory may need real tensors
        modules = parts(names)
    return {
        name: {key: tuple(value.shape) for key, value in module.state_dict().items()}
        for name, module in modules.items()
    }


def _misfit(ours: Shapes, theirs: Shapes | None) -> str:
    """Why a part cannot be taken; empty if it can."""
    if not ours:
        return ""
    if theirs is None:
        return "is not there"
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            return f"{key} has shape {theirs.get(key)} there, {ours.get(key)} in this run"
    return ""
