"""Checkpoints: atomic, checked, keyed by edge, so they load on any number of actors or none.

    checkpoints/step-00001200/
        weights.safetensors     <edge>/<name>                 e.g. 4-6/0.weight, stem/…
        optimizer.safetensors   <edge>/<parameter>/<slot>     e.g. 4-6/0.weight/exp_avg
        meta.json               step, epoch, seed, N, split, validation accuracy, settings
        manifest.json           sha256 of all files; id and settings' digest of the run

Actors write theirs themselves (shards.py): weights-00000.safetensors, weights-00001.safetensors, …

Data order, noise and learning rate are functions of (seed, step): the step *is* their state.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from treeprop_ray.config import hidden
from treeprop_ray.core import tensor_file
from treeprop_ray.errors import TrainingError, UserError, warn
from treeprop_ray.run.storage import MANIFEST, Storage, sha256, storage_at
from treeprop_ray.run.tensors import Tensors

FILES = ("weights.safetensors", "optimizer.safetensors", "meta.json")
KEYS = {"step": int, "epoch": int, "N": int, "split": str, "best": dict, "wall_seconds": float}
SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # slots with the shape of their parameter

SCALARS = ("scale/loss/", "data/", "cff/validation/")  # begin names of what belongs to no parameter

Place = Storage | Path | str  # the folder or URL that holds the checkpoints of a run


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete or altered; says which file and why."""


class NoRoom(TrainingError):
    """The storage is full."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    path: str
    weights: Mapping[str, Tensor]  # read when they are asked for
    optimizer: Mapping[str, Tensor]
    meta: dict[str, Any]
    manifest: Mapping[str, Any] = field(default_factory=dict)


def save(
    place: Place,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    meta: dict[str, Any],
    marks: Mapping[str, str] | None = None,
) -> str:
    """Write step-<n>, all of it or nothing; returns where it is. `marks` say whose it is."""
    storage, name = storage_at(place), name_of(meta["step"])
    meta = {**meta, "slots": names_digest(optimizer)}

    def fill(folder: Path) -> None:
        tensor_file.save(weights, folder / FILES[0])
        tensor_file.save(optimizer, folder / FILES[1])
        (folder / FILES[2]).write_text(json.dumps(meta, indent=2))
        sums = {file: sha256(folder / file) for file in FILES}
        (folder / MANIFEST).write_text(json.dumps({**sums, **(marks or {})}, indent=2))

    if not is_ours(manifest(storage, meta["step"]) or {}, marks):
        raise TrainingError(f"{storage.at(name)}: is of another run, which is left alone")
    with told(storage, name):
        storage.put(name, fill)
    return storage.at(name)


@contextlib.contextmanager
def told(storage: Storage, name: str) -> Iterator[None]:
    """What goes wrong inside is one line about a checkpoint that cannot be written."""
    try:
        yield
    except Exception as e:  # safetensors and remote file systems wrap OSError in types of their own
        reason = hidden(" ".join(str(e).split()) or repr(e))
        kind = NoRoom if is_full(e) else TrainingError
        raise kind(f"cannot write checkpoint {storage.at(name)}: {reason}") from e


def files_of(sums: Mapping[str, str], kind: str) -> list[str]:
    """The files of a kind (weights, optimizer) that a manifest lists: one, or one of each actor."""
    named = re.compile(rf"{kind}(-\d+)?\.safetensors")
    return sorted(file for file in sums if named.fullmatch(file))


def load(place: Place, step: int, verify: bool = True) -> Checkpoint:
    """Read and verify one checkpoint."""
    storage, name = storage_at(place), name_of(step)
    where = storage.at(name)
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(storage.get(name))
            sums = json.loads((folder / MANIFEST).read_text())
            kinds = [files_of(sums, kind) for kind in ("weights", "optimizer")]
            for file in (*(kinds[0] or FILES[:1]), *kinds[1], FILES[2]) if verify else ():
                if sha256(folder / file) != sums[file]:
                    raise DamagedCheckpoint(f"{where}/{file}: does not match its checksum")
            meta = json.loads((folder / FILES[2]).read_text())
            _check_meta(meta, f"{where}/{FILES[2]}", step)
            keeps = stack.pop_all()  # the files stay as long as somebody may read them
            weights, optimizer = (Tensors([folder / f for f in files], keeps) for files in kinds)
            if meta.get("slots", names_digest(optimizer)) != names_digest(optimizer):
                raise DamagedCheckpoint(f"{where}/{FILES[1]}: not the slots that were written")
            return Checkpoint(where, weights, optimizer, meta, sums)
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
    return [int(name[5:]) for name in storage_at(place).names() if is_step(name[5:])]


def is_step(text: str) -> bool:
    """Whether a text is a step number as names have it; `²` is a digit too, but no number."""
    return text.isascii() and text.isdigit()


def manifest(place: Place, step: int) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None if it cannot be read, so that nobody knows whose it is."""
    try:
        found = json.loads(storage_at(place).read(name_of(step), MANIFEST))
    except Exception:  # remote file systems have errors of their own
        return None
    return found if isinstance(found, dict) else None


def is_ours(theirs: Mapping[str, Any], marks: Mapping[str, str] | None) -> bool:
    """Whether a manifest is of the run that makes such marks; those of old versions do not say."""
    if "run" not in theirs or marks is None:
        return True
    return any(theirs.get(key) == mark for key, mark in marks.items())


def names_digest(tensors: Iterable[str]) -> str:
    """Names which tensors there are."""
    return hashlib.sha256("\n".join(sorted(tensors)).encode()).hexdigest()[:16]


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that a disk or a quota is full, however it is wrapped."""
    while error is not None:
        code = getattr(error, "errno", None)
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            return True
        error = error.__cause__
    return False


def keep(
    place: Place,
    state: tuple[dict[str, Tensor], dict[str, Tensor]],
    meta: dict[str, Any],
    marks: Mapping[str, str] | None,
    keep_last: int,
    best: int | None,
) -> str:
    """Save and prune; where there is no room for both, prune first. Returns where it is."""
    storage, step = storage_at(place), meta["step"]
    try:
        saved = save(storage, *state, meta, marks)
    except NoRoom:
        size = sum(t.nbytes for tensors in state for t in tensors.values())
        if not make_room(storage, step, keep_last, best, size):
            raise
        warn(f"no room for a checkpoint of step {step}: earlier ones were removed first")
        saved = save(storage, *state, meta, marks)
    prune(storage, step, keep_last, best, marks)
    return saved


def make_room(place: Place, step: int, keep_last: int, best: int | None, size: int) -> bool:
    """Remove what `prune` would remove once `step` is written, if that gives room for `size`."""
    storage = storage_at(place)
    old = [s for s in steps(storage) if s < step]
    doomed = [s for s in (old[: 1 - keep_last] if keep_last > 1 else old) if s != best]
    need, free = size + size // 20, storage.room() or 0
    need -= free if free < need else 0  # what is full with room to spare is a quota
    try:
        sizes = {s: storage.size(name_of(s)) for s in doomed}
    except Exception:  # remote file systems have errors of their own
        return False
    if not doomed or sum(sizes.values()) < need:
        return False
    for s in doomed:
        storage.remove(name_of(s))
        if (need := need - sizes[s]) <= 0:
            break
    return True


def newest(place: Place) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named and skipped."""
    for step in reversed(steps(place)):
        try:
            return load(place, step)
        except DamagedCheckpoint as e:
            warn(f"skipping damaged checkpoint: {e}")
    return None


def prune(
    place: Place,
    step: int,
    keep_last: int,
    best: int | None,
    marks: Mapping[str, str] | None = None,
) -> None:
    """Remove all up to `step` but the newest `keep_last` and the best, and those of other runs.

    Later ones were skipped as damaged when the run was taken up; they must not crowd out others.
    """
    storage = storage_at(place)
    for old in [s for s in steps(storage) if s <= step][:-keep_last]:
        if old != best and is_ours(manifest(storage, old) or {}, marks):
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
        if found[key].dtype != weights[key].dtype:
            raise UserError(
                f"{checkpoint.path}: is of another precision: {key} is {found[key].dtype} there, "
                f"{weights[key].dtype} in this run"
            )
    for key, slot in checkpoint.optimizer.items():
        if key.startswith(SCALARS):
            continue
        of = found.get(key.rpartition("/")[0])
        shaped = key.rpartition("/")[2] in SHAPED
        alike = of is not None and slot.shape == of.shape and slot.dtype == of.dtype
        if of is None or (shaped and not alike):
            raise UserError(f"{checkpoint.path}: is of another network: optimizer state {key}")
