"""Finding data sets that are laid out like the Hugging Face hub: a local root or the network."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from treeprop_ray.errors import UserError, first_line


def find_root(root: str | None) -> Path | None:
    """`data.root` or $TREEPROP_DATA, or its folder `hub`; None means the network."""
    given = root or os.environ.get("TREEPROP_DATA")
    if not given:
        return None
    path = Path(given).expanduser()
    if root and not path.is_dir():
        raise UserError(f"data.root={root}: no such folder")
    return path / "hub" if (path / "hub").is_dir() else path


def cache_folder(repo: str, split: str, root: str | None) -> Path:
    """Where decoded arrays of a split are kept; different roots do not share."""
    base = Path(os.environ.get("TREEPROP_CACHE", Path.home() / ".cache" / "treeprop_ray"))
    found = find_root(root)
    files = sorted((found / repo).rglob("*.parquet")) if found else []
    facts = [f"{f.resolve()}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12] if facts else "hub"
    return base / repo / f"{split}-{digest}"


def hub_reachable() -> bool:
    """Whether the Hugging Face hub's name can be looked up."""
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def prepare_offline() -> None:
    """Before the import of a hub library: without a network, no minute of retries."""
    if not hub_reachable():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load_split(repo: str, split: str, root: str | None, config: str | None = None) -> Any:
    """A split as a `datasets.Dataset`, from the local root if it has the set, else the network."""
    prepare_offline()
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    found = find_root(root)
    local = found / repo if found else None
    try:
        if local and local.is_dir():
            folder = local / config if config else local
            files = sorted(str(f) for f in folder.glob(f"{split}-*.parquet"))
            if not files:
                raise UserError(f"{repo}: no split {split} in {folder}")
            _check_readable(files)
            return datasets.load_dataset("parquet", data_files={split: files}, split=split)
        return datasets.load_dataset(repo, config, split=split)
    except UserError:
        raise
    except Exception as e:
        if local and local.is_dir():
            raise UserError(f"{local}: split {split} cannot be read: {first_line(e)}") from e
        where = f"not under {found}" if found else "no local root is set"
        raise UserError(
            f"data set {repo}: {where}, and the hub gave: {first_line(e)}; "
            f"either set data.root (or TREEPROP_DATA) to a folder that holds {repo}, "
            "or run once where the Hugging Face hub can be reached"
        ) from e


def _check_readable(files: Sequence[str]) -> None:
    """A file that is there and cannot be read is named."""
    import pyarrow.parquet

    for file in files:
        try:
            pyarrow.parquet.ParquetFile(file)
        except Exception as e:  # pyarrow has errors of its own
            raise UserError(f"{file}: cannot be read: {first_line(e)}") from e


def row_at(repo: str, split: str, root: str | None, row: int) -> str:
    """The file that holds a row of a split, and its number there, for a message."""
    import pyarrow.parquet

    found = find_root(root)
    for file in sorted((found / repo).glob(f"{split}-*.parquet")) if found else []:
        count = pyarrow.parquet.ParquetFile(file).metadata.num_rows
        if row < count:
            return f"{file}, row {row}"
        row -= count
    return f"{repo}, split {split}, row {row}"
