"""What must not be written down or shown: credentials inside URLs. No torch here."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(
    r"((?:^|[?&;])[^=&;\s]*(?:key|token|secret|sig|signature|password|credential)[^=&;\s]*=)"
    r"[^&;\s]+",
    re.IGNORECASE,
)


def hidden(value: Any) -> Any:
    """A text without the credentials of the URLs in it; other values as they are."""
    if not isinstance(value, str) or "://" not in value:
        return value
    start = value.index("://")
    return value[:start] + _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(HIDDEN, value[start:]))


def is_remote(place: str) -> bool:
    """Whether a place is an address that opening sends something to."""
    scheme, found, _ = place.partition("://")
    return bool(found) and scheme.lower() not in ("file", "local", "memory")
