"""Small files of a run: written whole or not at all, read with one line for a damaged one, and the
lock that keeps a second driver out of a run folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from treeprop_ray.errors import UserError, first_line

LOCK = ".lock"


def write_whole(path: Path, text: str) -> None:
    """Write a text file aside, sync it, rename it: a reader sees the old one or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_json(path: Path, *keys: str) -> Any:
    """What a JSON file holds; with `keys`, a mapping that has them. Damage is a UserError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: is damaged or cannot be read: {first_line(e)}") from e
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            raise UserError(f"{path}: is damaged: has no {key}")
    return value


class Lock:
    """At most one process writes into a folder. The lock ends with its process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock; UserError when another process has it."""
        self.path = folder / LOCK
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise UserError(
                f"{folder}: another process is writing this run ({holder or 'unknown'}); wait for "
                "it, stop it, or choose another name=…"
            ) from e
        except OSError:  # a file system without locks: as before, nothing keeps two apart
            pass
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let others in; twice is no mistake."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
