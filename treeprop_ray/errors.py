"""The one error type for mistakes that the user can mend; `cli.run` prints it on one line."""

import sys


class UserError(Exception):
    """Names the key, the value and what is allowed. Ends the command with exit code 2."""


class TrainingError(Exception):
    """A run that cannot go on (NaN, lost actors, full disk). Ends the command with exit code 1."""


class ActorLost(TrainingError):
    """An actor, its process or its machine died; the engine recovers from it."""


def warn(text: str) -> None:
    """A warning line that does not stop the run."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [repr(error)])[0]
