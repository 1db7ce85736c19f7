"""Names of the user's own networks and data sets: `package.module:factory`. No torch here."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

from treeprop_ray.errors import UserError, first_line

OWN = "fit:own"  # what a run of `fit` has for a name of its network and data


def dotted(value: str) -> bool:
    """Whether a name is written `package.module:factory`."""
    return re.fullmatch(r"[\w.]+:[\w.]+", value) is not None


def imported(key: str, value: str) -> Callable[..., Any]:
    """The factory that `key=package.module:factory` names; the current folder is searched too."""
    module, _, path = value.partition(":")
    try:
        if os.getcwd() not in sys.path:  # as under `python -m`
            sys.path.insert(0, os.getcwd())
        factory = reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as e:  # the user's module may raise anything
        reason = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"{key}={value}: cannot be imported: {reason}") from e
    if not callable(factory):
        raise UserError(f"{key}={value}: {path} is of type {type(factory).__name__}, not callable")
    return factory
