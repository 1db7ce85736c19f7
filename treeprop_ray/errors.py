"""What ends a command with one line: bad input (exit code 2), failed runs (1); see `cli.main`."""

import sys


class UserError(Exception):
    """Names the key, the value and what is allowed. Ends the command with exit code 2."""


class TrainingError(Exception):
    """A run that cannot go on (NaN, lost actors, full disk). Ends the command with exit code 1."""


class ActorLost(TrainingError):
    """An actor, its process or its machine died; the engine recovers from it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


def one_line(error: BaseException) -> str:
    """The text of an error; what would break the line (from a file or a value) is written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))


def warn(text: str) -> None:
    """A warning line that does not stop the run."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
