"""What ends a command with one line: bad input (exit code 2), failed runs (1); see `cli.main`.

No line shows the credentials of an address.
"""

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

TERMINATED = 128 + 15  # the exit code after SIGTERM
HIDDEN = "***"
# user:password@, of a path made of the address too (s3:/…), or with a slash in the password
_USER = re.compile(r"(\w:/{1,2})(?:[^/\s]+|[^/\s:@]+:(?!\d+/)[^\s@]+)@")
_QUERY = re.compile(
    r"((?:^|[?&;])[^=&;\s]*(?:key|token|secret|sig|signature|password|credential)[^=&;\s]*=)"
    r"[^&;\s]+",
    re.IGNORECASE,
)


class UserError(Exception):
    """Names the key, the value and what is allowed. Ends the command with exit code 2."""


class TrainingError(Exception):
    """A run that cannot go on (NaN, lost actors, full disk). Ends the command with exit code 1."""


class ActorLost(TrainingError):
    """An actor, its process or its machine died; the engine recovers from it."""


class Terminated(SystemExit):
    """SIGTERM, with what the run goes on from. Ends the command with one line and code 143."""

    def __init__(self, saved: str = "") -> None:
        super().__init__(TERMINATED)
        self.saved = saved


def hidden(value: Any) -> Any:
    """A text without the credentials of the addresses in it; other values as they are."""
    if not isinstance(value, str) or ":/" not in value:
        return value
    value = _USER.sub(rf"\1{HIDDEN}@", value)
    start = value.index(":/")
    return value[:start] + _QUERY.sub(rf"\1{HIDDEN}", value[start:])


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


def one_line(error: BaseException) -> str:
    """The text of an error; what would break the line (from a file or a value) is written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in hidden(str(error)))


def place_of(error: BaseException) -> str:
    """ " (own.py, line 12)": where in the user's own files an error arose; empty if in none."""
    ours = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    site = sysconfig.get_path("purelib")
    theirs = tuple(str(Path(site) / name) for name in ("torch", "ray"))
    frames = traceback.extract_tb(error.__traceback__)
    known = [f for f in frames if f.filename.startswith(site) and not f.filename.startswith(ours)]
    own = [f for f in frames if not f.filename.startswith((*ours, site))]
    shown = own or [f for f in known if not f.filename.startswith(theirs)]
    return f" ({Path(shown[-1].filename).name}, line {shown[-1].lineno})" if shown else ""


def told_at(where: str, error: Exception) -> "TrainingError | UserError":
    """An error of whatever kind as one that names the place in the network and the user's line."""
    if isinstance(error, TrainingError | UserError):
        return error
    text = " ".join(str(error).split())
    return TrainingError(f"{where}: {type(error).__name__}: {text}{place_of(error)}")


def warn(text: str) -> None:
    """A warning line that does not stop the run."""
    print(f"warning: {hidden(text)}", file=sys.stderr, flush=True)
