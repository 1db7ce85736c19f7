"""Where checkpoints lie: a folder of this machine, or any fsspec URL (s3://…, gs://…, hdfs://…).

A checkpoint is a folder of files under one name. Files are always made in a local folder first:

    on disk     written aside, synced, renamed into place: the name exists only when it is whole
    elsewhere   uploaded one by one, the manifest last: without it, the name is not a checkpoint
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from treeprop_ray.config import hidden
from treeprop_ray.errors import UserError, first_line

MANIFEST = "manifest.json"  # written last


class Storage(ABC):
    """A place that holds checkpoints by name."""

    @abstractmethod
    def names(self) -> list[str]:
        """All `step-…`, oldest first, damaged ones too."""

    @abstractmethod
    def put(self, name: str, fill: Callable[[Path], None]) -> None:
        """Store what `fill` writes into the folder it is given; all of it or nothing."""

    @abstractmethod
    def get(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A local folder with the files of a name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a name; deleting what is not there is no mistake."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the place, and see that it can be written to."""

    def tidy(self) -> None:  # noqa: B027 (elsewhere nothing is written aside)
        """Remove what a killed writer left; nobody else may be writing."""

    @abstractmethod
    def read(self, name: str, file: str) -> bytes:
        """One small file of a name."""

    # several processes write one name: begin, add files from anywhere, commit

    @abstractmethod
    def begin(self, name: str) -> str:
        """Make room for a name; gives a token by which others see whether it is the same place."""

    @abstractmethod
    def sees(self, name: str, token: str) -> bool:
        """Whether what was begun elsewhere can be added to from here."""

    @abstractmethod
    def add(self, name: str, file: str, fill: Callable[[Path], str]) -> str:
        """Add the file that `fill` writes, which gives its sha256. The manifest is the last."""

    @abstractmethod
    def commit(self, name: str) -> None:
        """All files are there."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes that removing a name would free."""

    def room(self) -> int | None:
        """Bytes that are free, where that is known."""
        return None

    @abstractmethod
    def at(self, name: str) -> str:
        """The place of a name, for people."""


class Disk(Storage):
    """A folder of this machine (or a mounted network folder)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        return sorted(p.name for p in self.root.glob("step-*") if p.is_dir())

    def put(self, name: str, fill: Callable[[Path], None]) -> None:
        target, aside = self.root / name, self.root / f".{name}.tmp"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            fill(aside)
            for path in (*aside.iterdir(), aside):
                _sync(path)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(aside, target)
            _sync(self.root)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def begin(self, name: str) -> str:
        aside, token = self.root / f".{name}.tmp", uuid.uuid4().hex
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / f".{token}").touch()
        return token

    def sees(self, name: str, token: str) -> bool:
        return (self.root / f".{name}.tmp" / f".{token}").exists()

    def add(self, name: str, file: str, fill: Callable[[Path], str]) -> str:
        path = self.root / f".{name}.tmp" / file
        digest = fill(path)
        _sync(path)
        return digest

    def commit(self, name: str) -> None:
        target, aside = self.root / name, self.root / f".{name}.tmp"
        for token in aside.glob(".*"):
            token.unlink()
        _sync(aside)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)
        _sync(self.root)

    @contextlib.contextmanager
    def get(self, name: str) -> Iterator[Path]:
        yield self.root / name

    def remove(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)

    def prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        for left in self.root.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def size(self, name: str) -> int:
        return sum(p.stat().st_size for p in (self.root / name).glob("*"))

    def read(self, name: str, file: str) -> bytes:
        return (self.root / name / file).read_bytes()

    def room(self) -> int | None:
        return shutil.disk_usage(self.root).free

    def at(self, name: str) -> str:
        return str(self.root / name)


class Remote(Storage):
    """A folder of any other fsspec file system."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self.fs, self.root, self.url = fs, root.rstrip("/"), hidden(url.rstrip("/"))

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        last = (path.rstrip("/").rpartition("/")[2] for path in found)
        return sorted(name for name in last if name.startswith("step-"))

    def put(self, name: str, fill: Callable[[Path], None]) -> None:
        target = f"{self.root}/{name}"
        with tempfile.TemporaryDirectory(prefix="treeprop-") as made:
            fill(Path(made))
            self.remove(name)
            files = sorted(p.name for p in Path(made).iterdir())
            files.sort(key=lambda file: file == MANIFEST)
            try:
                self.fs.makedirs(target, exist_ok=True)
                for file in files:
                    self.fs.put_file(str(Path(made) / file), f"{target}/{file}")
            except BaseException:
                with contextlib.suppress(Exception):
                    self.remove(name)
                raise

    def begin(self, name: str) -> str:
        self.remove(name)
        self.fs.makedirs(f"{self.root}/{name}", exist_ok=True)
        return ""

    def sees(self, name: str, token: str) -> bool:
        return True

    def add(self, name: str, file: str, fill: Callable[[Path], str]) -> str:
        with tempfile.TemporaryDirectory(prefix="treeprop-") as made:
            path = Path(made) / file
            digest = fill(path)
            self.fs.put_file(str(path), f"{self.root}/{name}/{file}")
            return digest

    def commit(self, name: str) -> None:
        pass  # with the manifest

    @contextlib.contextmanager
    def get(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="treeprop-") as made:
            for path in self.fs.ls(f"{self.root}/{name}", detail=False):
                self.fs.get_file(path, str(Path(made) / path.rpartition("/")[2]))
            yield Path(made)

    def remove(self, name: str) -> None:
        if self.fs.exists(f"{self.root}/{name}"):
            self.fs.rm(f"{self.root}/{name}", recursive=True)

    def read(self, name: str, file: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self.root}/{name}/{file}"))

    def size(self, name: str) -> int:
        return int(self.fs.du(f"{self.root}/{name}"))

    def prepare(self) -> None:
        probe = f"{self.root}/.probe"
        self.fs.makedirs(self.root, exist_ok=True)
        self.fs.pipe_file(probe, b"treeprop_ray")
        self.fs.rm_file(probe)

    def at(self, name: str) -> str:
        return f"{self.url}/{name}"


def storage_at(place: Storage | Path | str) -> Storage:
    """The storage of a path or URL; a URL that cannot be opened is a UserError."""
    if isinstance(place, Storage):
        return place
    if isinstance(place, Path):
        return Disk(place)
    try:
        fs, root = fsspec.core.url_to_fs(place)
    except Exception as e:  # an unknown protocol, or one whose package is not installed
        reason = hidden(first_line(e))
        shown = hidden(place)
        raise UserError(f"storage={shown}: not a folder or an fsspec URL: {reason}") from e
    return Disk(Path(root)) if isinstance(fs, LocalFileSystem) else Remote(fs, root, place)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    """The checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while part := f.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
