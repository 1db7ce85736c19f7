"""Checkpoints: atomic, checked, keyed by edge, so they load on any number of actors or none.

    checkpoints/step-00001200/
        weights.safetensors     <edge>/<name>                 e.g. 4-6/0.weight, stem/…
        optimizer.safetensors   <edge>/<parameter>/<slot>     e.g. 4-6/0.weight/exp_avg
        meta.json               step, epoch, seed, N, split, validation accuracy
        manifest.json           sha256 of the three files

Data order, noise and learning rate are functions of (seed, step): the step *is* their state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from treeprop_ray.errors import TrainingError, UserError, warn
from treeprop_ray.run.storage import MANIFEST, Storage, storage_at

FILES = ("weights.safetensors", "optimizer.safetensors", "meta.json")
KEYS = {"step": int, "epoch": int, "N": int, "split": str, "best": dict, "wall_seconds": float}
SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # slots with the shape of their parameter

Place = Storage | Path | str  # the folder or URL that holds the checkpoints of a run


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete or altered; says which file and why."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    path: str
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    meta: dict[str, Any]


def save(
    place: Place, weights: dict[str, Tensor], optimizer: dict[str, Tensor], meta: dict[str, Any]
) -> str:
    """Write step-<n>, all of it or nothing; returns where it is."""
    storage, name = storage_at(place), name_of(meta["step"])

    def fill(folder: Path) -> None:
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / FILES[0])
        save_file({k: v.contiguous() for k, v in optimizer.items()}, folder / FILES[1])
        (folder / FILES[2]).write_text(json.dumps(meta, indent=2))
        sums = {file: _sha256(folder / file) for file in FILES}
        (folder / MANIFEST).write_text(json.dumps(sums, indent=2))

    try:
        storage.put(name, fill)
    except Exception as e:  # safetensors and remote file systems wrap OSError in types of their own
        reason = " ".join(str(e).split()) or repr(e)
        raise TrainingError(f"cannot write checkpoint {storage.at(name)}: {reason}") from e
    return storage.at(name)


def load(place: Place, step: int) -> Checkpoint:
    """Read and verify one checkpoint."""
    storage, name = storage_at(place), name_of(step)
    where = storage.at(name)
    try:
        with storage.get(name) as folder:
            sums = json.loads((folder / MANIFEST).read_text())
            for file in FILES:
                if _sha256(folder / file) != sums[file]:
                    raise DamagedCheckpoint(f"{where}/{file}: does not match its checksum")
            meta = json.loads((folder / FILES[2]).read_text())
            _check_meta(meta, f"{where}/{FILES[2]}", step)
            weights, optimizer = (load_file(folder / file) for file in FILES[:2])
            return Checkpoint(where, weights, optimizer, meta)
    except DamagedCheckpoint:
        raise
    except FileNotFoundError as e:
        missing = Path(str(e.filename)).name if e.filename else name
        raise DamagedCheckpoint(f"{where}: {missing} is missing") from e
    except Exception as e:
        reason = " ".join(str(e).split()) or repr(e)
        raise DamagedCheckpoint(f"{where}: {reason}") from e


def _check_meta(meta: Any, where: str, step: int) -> None:
    """A file of another program may have checksums too."""
    for key, kind in KEYS.items():
        if not isinstance(meta, dict) or not isinstance(meta.get(key), kind):
            raise DamagedCheckpoint(f"{where}: has no {key}, so it is of another program")
    if meta["step"] != step:
        raise DamagedCheckpoint(f"{where}: is of step {meta['step']}")


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def steps(place: Place) -> list[int]:
    """The steps of a run's checkpoints, oldest first."""
    return [int(name[5:]) for name in storage_at(place).names() if name[5:].isdigit()]


def newest(place: Place) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named and skipped."""
    for step in reversed(steps(place)):
        try:
            return load(place, step)
        except DamagedCheckpoint as e:
            warn(f"skipping damaged checkpoint: {e}")
    return None


def prune(place: Place, step: int, keep_last: int, best: int | None) -> None:
    """Remove all up to `step` but the newest `keep_last` and the best.

    Later ones were skipped as damaged when the run was taken up; they must not crowd out others.
    """
    storage = storage_at(place)
    for old in [s for s in steps(storage) if s <= step][:-keep_last]:
        if old != best:
            storage.remove(name_of(old))


def check_fits(
    checkpoint: Checkpoint, N: int, split: str, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Raise UserError when the checkpoint is of another tree, or of blocks unlike `weights`."""
    meta = checkpoint.meta
    if (meta["N"], meta["split"]) != (N, split):
        raise UserError(
            f"{checkpoint.path}: is of a tree with N={meta['N']} split={meta['split']}, "
            f"this run has N={N} split={split}"
        )
    if weights is None:
        return
    found = checkpoint.weights
    for key in sorted(found.keys() | weights.keys()):
        sides = (found.get(key), weights.get(key))
        theirs, ours = (None if t is None else tuple(t.shape) for t in sides)
        if theirs != ours:
            raise UserError(
                f"{checkpoint.path}: is of another network: {key} has shape {theirs} there, "
                f"{ours} in this run"
            )
    for key, slot in checkpoint.optimizer.items():
        of = found.get(key.rpartition("/")[0])
        shaped = key.rpartition("/")[2] in SHAPED
        if of is not None and shaped and slot.shape != of.shape:
            raise UserError(f"{checkpoint.path}: is of another network: optimizer state {key}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while part := f.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
