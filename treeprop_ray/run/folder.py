"""The run folder: config.yaml, metrics.csv, summary.json, TensorBoard events, figures."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from treeprop_ray import config
from treeprop_ray.config import Change, Settings
from treeprop_ray.core import devices
from treeprop_ray.errors import UserError, warn
from treeprop_ray.run import checkpoint
from treeprop_ray.run.files import LOCK, Lock, read_json, write_whole
from treeprop_ray.run.identity import Identity
from treeprop_ray.run.storage import Storage, storage_at

# what every reader of a summary relies on
SUMMARY = {
    "name": str, "method": str, "engine": str, "steps": int, "epochs": int | float, "N": int,
    "depth": int, "wall_seconds": int | float, "final": dict, "best_validation": dict, "table": str,
    "parameters_deployed": int, "parameters_trained": int, "seed": int, "command": str,
    "commit": str, "date": str, "versions": dict, "hardware": dict,
}  # fmt: skip


class RunFolder:
    """results/runs/<name>: made new, or taken up where an earlier run left off."""

    def __init__(self, settings: Settings, command: str | None = None) -> None:
        self.settings, self.command = settings, command
        self.name = config.run_name(settings)
        self.path = Path(settings.out) / self.name
        self.storage = checkpoints_of(settings, self.path)
        self.identity = Identity.of(settings, self.path)
        self.changed: list[Change] = []  # settings that are others than before
        self._lock: Lock | None = None
        is_run = (self.path / "config.yaml").is_file()
        if is_run and not settings.fresh:
            changed = config.changes(config.load_file(self.path / "config.yaml"), settings)
            self._check_changes(changed)
            self.changed = changed
        elif not is_run and any(not p.name.startswith(".") for p in _entries(self.path)):
            raise UserError(
                f"{self.path}: is not empty and is no run folder; choose another name=…"
            )

    def _check_changes(self, changed: Sequence[Change]) -> None:
        """Other settings only where the user says so, and only those of the optimizer."""
        refused = [str(c) for c in changed if not c.allowed]
        if refused or (changed and not self.settings.resume_with_changes):
            mild = "" if refused else ", or resume_with_changes=true to go on with them"
            raise UserError(
                f"{self.path} holds a run with other settings "
                f"({'; '.join(refused or map(str, changed))}); "
                f"choose another name=… or fresh=true{mild}"
            )

    @property
    def changes(self) -> list[dict[str, Any]]:
        """With which other settings the run was taken up, and from which step on."""
        path = self.path / "changes.json"
        found = read_json(path) if path.is_file() else []
        if not isinstance(found, list):
            raise UserError(f"{path}: is damaged: must hold a list")
        return found

    def _record_changes(self) -> None:
        if not self.changed:
            return
        step = max(checkpoint.steps(self.storage), default=0)
        new = [{"step": step, "key": c.key, "old": c.old, "new": c.new} for c in self.changed]
        write_whole(self.path / "changes.json", json.dumps(self.changes + new, indent=2) + "\n")
        print(f"from step {step} on: {'; '.join(map(str, self.changed))}", flush=True)
        self.changed = []

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run; one that is damaged is made again."""
        if self.settings.fresh or not (self.path / "summary.json").is_file():
            return None
        try:
            return read_summary(self.path)
        except UserError as e:
            warn(f"{e}; it is made again")
            return None

    def claim(self) -> None:
        """Keep other processes from writing here, from now to `release`."""
        if self._lock is None and self.path.is_dir():
            self._lock = Lock(self.path)

    def release(self) -> None:
        """Let others write here."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def open(self) -> None:
        """Make the folder and write the resolved settings."""
        s = self.settings
        if s.storage:
            self._prepare()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.claim()
            if s.fresh:
                self._start_anew()
            self._record_changes()
            write_whole(self.path / "config.yaml", config.to_yaml(s))
            self.identity.keep(self.path)
        except OSError as e:
            raise UserError(f"out={s.out}: cannot write there: {_reason(e)}") from e
        self._prepare()
        self.storage.tidy()

    def _prepare(self) -> None:
        s = self.settings
        key = f"storage={config.hidden(s.storage)}" if s.storage else f"out={s.out}"
        try:
            self.storage.prepare()
        except Exception as e:  # remote file systems have errors of their own
            raise UserError(f"{key}: cannot write there: {config.hidden(_reason(e))}") from e

    def _start_anew(self) -> None:
        """fresh=true: what this run has left behind goes; what is of another stays."""
        if self.settings.storage:
            if others := self.identity.others(self.storage):
                raise UserError(
                    f"fresh=true: {others[0]} is of another run and is not deleted; choose another "
                    "name=… or storage=…, or remove it yourself"
                )
            for name in self.storage.names():
                self.storage.remove(name)
        if (self.path / "config.yaml").is_file():
            for entry in _entries(self.path):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()
        self.identity = Identity.of(self.settings, self.path)

    def keep_permutation(self, permutation: Tensor | None) -> None:
        """Store the order in which sequences are read; a run taken up again must have the same."""
        if permutation is not None:
            check_permutation(str(self.path), permutation)
            write_whole(self.path / "permutation.json", json.dumps(permutation.tolist()))

    def write_summary(self, figures: Mapping[str, Any]) -> None:
        """summary.json, whole or not at all."""
        text = json.dumps({**figures, **provenance(self.command)}, indent=2) + "\n"
        write_whole(self.path / "summary.json", text)


def read_summary(folder: Path, *keys: str) -> dict[str, Any]:
    """summary.json of a finished run; UserError for one that is damaged or lacks some `keys`."""
    keys = keys or tuple(SUMMARY)
    path = folder / "summary.json"
    found: dict[str, Any] = read_json(path, *keys)
    for key, kind in SUMMARY.items():
        if key in found and not isinstance(found[key], kind):
            raise UserError(f"{path}: is damaged: {key} is {type(found[key]).__name__}")
    return found


def _entries(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def run_settings(run: str) -> Settings:
    """The settings of a run folder."""
    if not run:
        raise UserError("run= : give a run folder, e.g. run=results/runs/<name>")
    path = Path(run)
    if not path.is_dir():
        raise UserError(f"run={run}: no such folder")
    if not (path / "config.yaml").is_file():
        raise UserError(f"run={run}: holds no config.yaml, so it is no run folder")
    return config.load_file(path / "config.yaml")


def check_permutation(run: str, permutation: Tensor | None) -> None:
    """The order in which a run has read its numbers is the one that this program would use."""
    stored = Path(run) / "permutation.json"
    if permutation is None or not stored.is_file():
        return
    if read_json(stored) != permutation.tolist():
        raise UserError(f"{stored}: is not the permutation that data.permuted=true gives here")


def checkpoints_of(settings: Settings, folder: Path) -> Storage:
    """Where the checkpoints of a run folder lie: inside it, or at <storage>/<run>."""
    if not settings.storage:
        return storage_at(folder / "checkpoints")
    return storage_at(f"{settings.storage.rstrip('/')}/{folder.name}")


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return text or repr(error)


def provenance(command: str | None = None) -> dict[str, Any]:
    """Versions, hardware, command, commit and date: what a figure needs beside it.

    `command` stands in for this process's own where that is not what a user would repeat.
    """
    packages = ("treeprop_ray", "torch", "ray", "numpy", "omegaconf", "safetensors")
    gpus = devices.gpus.names()
    return {
        "command": command or this_command(),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "hardware": {
            "machine": platform.machine(),
            "cpu": _cpu_name(),
            "cores": _cores(),
            "gpus": gpus,
        },
    }


def this_command() -> str:
    """The command of this process, as a user would type it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    script = Path(sys.argv[0])
    started = ["-m", spec.name] if spec else [script.name if script.is_absolute() else str(script)]
    return shlex.join(["python", *started, *map(config.hidden, sys.argv[1:])])


def _version(package: str) -> str:
    try:
        return version(package)
    except Exception:
        return "not installed"


def _commit() -> str:
    """The commit; -dirty when the package itself (not a table in results/) differs from it."""
    found = _git("describe", "--always")
    return found + "-dirty" * bool(found and _git("status", "--porcelain", ".")) or "unknown"


def _git(*words: str) -> str:
    try:
        found = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return ""
    return found.stdout.strip()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
