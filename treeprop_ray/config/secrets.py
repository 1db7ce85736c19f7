"""Which places are far away. What must not be shown of them is `errors.hidden`. No torch here."""

from __future__ import annotations


def is_remote(place: str) -> bool:
    """Whether a place is an address that opening sends something to."""
    scheme, found, _ = place.partition("://")
    return bool(found) and scheme.lower() not in ("file", "local", "memory")
