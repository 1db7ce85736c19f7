"""What ends a command with one line; from the first import on, signals do too."""

from treeprop_ray.errors import signals  # sets itself up; nothing is imported before it
from treeprop_ray.errors.lines import (
    HIDDEN,
    TERMINATED,
    ActorLost,
    Terminated,
    TrainingError,
    UserError,
    first_line,
    hidden,
    one_line,
    place_of,
    told_at,
    warn,
)

__all__ = [
    "HIDDEN", "TERMINATED", "ActorLost", "Terminated", "TrainingError", "UserError",
    "first_line", "hidden", "one_line", "place_of", "signals", "told_at", "warn",
]  # fmt: skip
