"""init_from: a run that starts from the weights of another one, or of a Hugging Face folder.

The driver compares names and shapes; each host then reads the tensors of its own parts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from treeprop_ray.config import is_remote
from treeprop_ray.core.network import edge_name
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError, first_line
from treeprop_ray.methods import Job
from treeprop_ray.methods.job import Parts
from treeprop_ray.models import hf_parts
from treeprop_ray.run import checkpoint
from treeprop_ray.run.files import read_json
from treeprop_ray.run.folder import checkpoints_of, run_settings
from treeprop_ray.run.storage import Storage, storage_at
from treeprop_ray.run.tensors import Tensors

EXPORTED = "model.safetensors"
Keys = Mapping[str, Mapping[str, str]]  # part -> its tensor -> the tensor's name in the file
Shapes = Mapping[str, tuple[int, ...]]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Source:
    """A file of weights, in a checkpoint or in a folder that export wrote."""

    given: str
    storage: Storage
    name: str
    file: str = ""  # of an export
    end: int = 0  # exported: where its path ends; the edge that ends there is the head

    @property
    def place(self) -> str:
        """Where it is."""
        return self.storage.at(self.name)

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
                if self.end == tree.N and not tree.grouping and part.endswith(f"-{self.end}"):
                    part = head
                keys.setdefault(part, {})[tensor] = key
                shapes.setdefault(part, {})[tensor] = weights.shape(key)
        return keys, shapes

    def read(self, keys: Keys, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The tensors of some parts."""
        with self.open() as weights:
            for name in names:
                yield name, {own: weights[key] for own, key in keys[name].items()}


@dataclass(frozen=True)
class HuggingFace:
    """A folder of Transformers."""

    given: str
    place: str
    tree: Tree
    as_gpt: bool  # for the parts of model.name=gpt

    def stored(self) -> tuple[Keys, Tensors] | None:
        """What its tensors are called in the folder's safetensors files; None where these do not
        have all of them by a name of the model's, so that Transformers has to read the folder."""
        try:
            tensors = Tensors(hf_parts.files(Path(self.place)))
            names = hf_parts.names(self.place, self.tree, self.as_gpt)
        except (OSError, ValueError, KeyError, SafetensorError):  # Transformers says what is wrong
            return None
        except UserError as e:
            raise UserError(f"init_from={self.given}: {e}") from e
        keys = {
            part: {own: next((c for c in called if c in tensors), "") for own, called in of.items()}
            for part, of in names.items()
        }
        found = all(key for of in keys.values() for key in of.values())
        return (keys, tensors) if found else None

    def states(self) -> hf_parts.States:
        """Every part of the tree, read by Transformers."""
        try:
            return hf_parts.read(self.place, self.tree, self.as_gpt)
        except UserError as e:
            raise UserError(f"init_from={self.given}: {e}") from e

    def contents(self, tree: Tree) -> tuple[Keys, Mapping[str, Shapes]]:
        """Names and shapes of the tensors, by part."""
        if stored := self.stored():
            keys, tensors = stored
            shapes = {
                part: {own: self._shape(tensors.shape(key), part) for own, key in of.items()}
                for part, of in keys.items()
            }
            return keys, shapes
        states = self.states()
        keys = {part: {key: key for key in state} for part, state in states.items()}
        shapes = {p: {k: tuple(t.shape) for k, t in state.items()} for p, state in states.items()}
        return keys, shapes

    def _shape(self, shape: tuple[int, ...], part: str) -> tuple[int, ...]:
        return tuple(hf_parts.turned(torch.empty(shape, device="meta"), part, self.as_gpt).shape)

    def read(self, keys: Keys, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The tensors of some parts, and no others where the files allow it."""
        if stored := self.stored():
            keys, tensors = stored
            for name in names:
                yield (
                    name,
                    {
                        own: hf_parts.turned(tensors[key], name, self.as_gpt)
                        for own, key in keys[name].items()
                    },
                )
        else:
            states = self.states()
            for name in names:
                yield name, dict(states[name])


def source_of(given: str, job: Job) -> Source | HuggingFace:
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
    if hf_parts.is_folder(path):
        if job.tree.grouping:
            raise UserError(
                f"init_from={given}: a folder of Hugging Face starts blocks of one layer; leave "
                "model.group out"
            )
        stem = job.parts(["stem"])["stem"] if "stem" in _names(job) else None
        try:
            return HuggingFace(given, str(path), job.tree, hf_parts.is_gpt(stem))
        except UserError as e:
            raise UserError(f"init_from={given}: {e}") from e
    raise UserError(
        f"init_from={given}: must be a run folder, a checkpoint (…/checkpoints/step-…), a folder "
        "that export wrote, or one of Hugging Face"
    )


def _names(job: Job) -> Sequence[str]:
    return job.method.all_parts(job.settings, job.tree)


def started(job: Job) -> tuple[Job, dict[str, Any]]:
    """The job whose parts begin with the weights that `init_from` names, and what to record."""
    settings, names = job.settings, _names(job)
    source = source_of(settings.init_from, job)
    ours = _shapes(job.parts, names)
    in_file = source.contents(job.tree)
    keys, theirs = regrouped(in_file[0], ours, job.tree), regrouped(in_file[1], ours, job.tree)
    misfits = {
        name: reason for name, mine in ours.items() if (reason := _misfit(mine, theirs.get(name)))
    }
    taken = [name for name in names if name in keys and name not in misfits]
    if misfits and (settings.init_strict or not taken):
        name, reason = next(iter(misfits.items()))
        more = f" (and {len(misfits) - 1} more parts)" if len(misfits) > 1 else ""
        hint = "; init_strict=false lets them start fresh" if taken else ""
        raise UserError(f"init_from={settings.init_from}: part {name}: {reason}{more}{hint}")
    print(f"starting from {source.place}: {len(taken)} parts", end="", flush=True)
    print(f"; fresh: {', '.join(misfits)}" if misfits else "", flush=True)
    record = {"from": source.place, "parts": taken, "fresh": list(misfits)}
    mine = {name: keys[name] for name in taken}
    return replace(job, parts=partial(_loaded, job.parts, source, mine)), record


def regrouped(
    contents: Mapping[str, Mapping[str, Value]], ours: Mapping[str, Shapes], tree: Tree
) -> dict[str, dict[str, Value]]:
    """What a file has for the parts of this run, where either may have several layers in a block:
    layers are found by the single states between which they stand (core/grouping.py)."""
    inner = {part for part, of in contents.items() if any(_layer("", name)[0] for name in of)}
    ends = [int(_layer("0-0", name)[0].partition("-")[2]) for p in inner for name in contents[p]]
    layers: dict[str, dict[str, Value]] = {}
    for part, tensors in contents.items():
        whole = part
        if inner and part not in {
            *inner,
            "stem",
        }:  # the file has groups, and its head counts blocks
            whole = f"{max(ends)}-{max(ends) + 1}"
        for name, value in tensors.items():
            layer, rest = _layer(whole, name)
            layers.setdefault(layer, {})[rest] = value
    found: dict[str, dict[str, Value]] = {}
    for part, mine in ours.items():
        whole = part  # the layer of a part that is none of several
        if tree.grouping and part == edge_name(tree.head):
            whole = edge_name(tree.grouping.head)
        known = [
            (layer, name.removesuffix(r)) for name in mine for layer, r in [_layer(whole, name)]
        ]
        for layer, prefix in dict.fromkeys(known):
            for rest, value in layers.get(layer, {}).items():
                found.setdefault(part, {})[prefix + rest] = value
    return found


def _layer(part: str, tensor: str) -> tuple[str, str]:
    """The layer that a tensor of a part belongs to, and its name there."""
    inside = re.match(r"(\d+-\d+)\.(.+)", tensor)
    return (inside[1], inside[2]) if inside else (part, tensor)


def _loaded(
    parts: Parts, source: Source | HuggingFace, keys: Keys, names: Sequence[str]
) -> dict[str, nn.Module]:
    """The parts of a host with the weights of the source."""
    modules = parts(names)
    mine = [name for name in names if name in keys]
    if mine:
        for name, tensors in source.read(keys, mine):
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
