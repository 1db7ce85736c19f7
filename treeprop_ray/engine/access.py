"""Who may use a Ray, and which one `auto` means."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ray._private import services

from treeprop_ray.errors import UserError, warn


def token_file() -> Path:
    """Where Ray keeps the token of this user."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def is_open(path: Path) -> bool:
    """Whether others than the owner may read a file."""
    try:
        return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except OSError:
        return False


def guard() -> None:
    """Warn of a Ray without a token; a token that others can read is taken from them."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode and mode.lower() != "token":
        warn(
            f"RAY_AUTH_MODE={mode}: whoever reaches this Ray can run code here; "
            "unset it or set it to token"
        )
    if is_open(path := token_file()):
        closed = close_token()
        done = "now only its owner can (mode 0600)" if closed else "chmod 600 it"
        warn(f"{path}: others could read Ray's token; {done}")


def close_token() -> bool:
    """Only the owner may read Ray's token; Ray itself writes it for everybody to read."""
    try:
        if is_open(token_file()):
            token_file().chmod(0o600)
        return True
    except OSError:
        return False


def the_only(address: str) -> str:
    """The cluster that `auto` means; UserError where several run on this machine."""
    if address != "auto" or os.environ.get("RAY_ADDRESS"):
        return address
    services.find_gcs_addresses.cache_clear()
    running = sorted(services.find_gcs_addresses())
    if len(running) > 1:
        raise UserError(
            f"ray.address=auto: {len(running)} clusters run on this machine "
            f"({', '.join(running)}); name one of them"
        )
    return running[0] if running else address
