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
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from treeprop_ray.errors import TrainingError, UserError

FILES = ("weights.safetensors", "optimizer.safetensors", "meta.json")


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete or altered; says which file and why."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    path: Path
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    meta: dict[str, Any]


def save(
    folder: Path, weights: dict[str, Tensor], optimizer: dict[str, Tensor], meta: dict[str, Any]
) -> Path:
    """Write step-<n> aside, sync it to disk and rename it into place."""
    target = folder / f"step-{meta['step']:08d}"
    aside = folder / f".{target.name}.tmp"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in weights.items()}, aside / FILES[0])
        save_file({k: v.contiguous() for k, v in optimizer.items()}, aside / FILES[1])
        (aside / FILES[2]).write_text(json.dumps(meta, indent=2))
        sums = {name: _sha256(aside / name) for name in FILES}
        (aside / "manifest.json").write_text(json.dumps(sums, indent=2))
        for path in aside.iterdir():
            _sync(path)
        _sync(aside)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)
        _sync(folder)
    except Exception as e:  # safetensors wraps OSError in its own type
        shutil.rmtree(aside, ignore_errors=True)
        raise TrainingError(f"cannot write checkpoint {target}: {e}; earlier ones are whole") from e
    return target


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint."""
    try:
        sums = json.loads((path / "manifest.json").read_text())
        for name in FILES:
            if _sha256(path / name) != sums[name]:
                raise DamagedCheckpoint(f"{path / name}: does not match its checksum")
        meta = json.loads((path / FILES[2]).read_text())
        return Checkpoint(path, load_file(path / FILES[0]), load_file(path / FILES[1]), meta)
    except DamagedCheckpoint:
        raise
    except Exception as e:
        raise DamagedCheckpoint(f"{path}: {e}") from e


def steps(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def newest(folder: Path, warn: Any = print) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named and skipped."""
    for path in reversed(steps(folder)):
        try:
            return load(path)
        except DamagedCheckpoint as e:
            warn(f"skipping damaged checkpoint: {e}")
    return None


def prune(folder: Path, keep_last: int, best: Path | None) -> None:
    """Remove all but the newest `keep_last` and the best."""
    for path in steps(folder)[:-keep_last]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)


def check_fits(checkpoint: Checkpoint, N: int, split: str) -> None:
    """Raise UserError when the checkpoint is of another tree."""
    meta = checkpoint.meta
    if (meta.get("N"), meta.get("split")) != (N, split):
        raise UserError(
            f"{checkpoint.path}: is of a tree with N={meta.get('N')} split={meta.get('split')}, "
            f"this run has N={N} split={split}"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while part := f.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
