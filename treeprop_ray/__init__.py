"""TreeProp on Ray: train the blocks of a deep network as a binary tree, deploy the plain chain."""

from __future__ import annotations

import importlib as _importlib
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from treeprop_ray import errors as _errors  # noqa: F401  it says what signals do meanwhile

if _TYPE_CHECKING:
    from treeprop_ray.core.network import Blueprint
    from treeprop_ray.data.sets import DataSet, Split
    from treeprop_ray.fitting.fit import Fitted, fit
    from treeprop_ray.models.pretrained import TreeNetwork
    from treeprop_ray.run.callbacks import Callback

# Ray reads these when it is first imported, so they are set here.
_os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # keep 127.0.0.1 as it is
_os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no warning about CPU actors
_os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the driver reports errors itself

__version__ = "0.1.0"
__all__ = ["Blueprint", "Callback", "DataSet", "Fitted", "Split", "TreeNetwork", "fit"]

# Imported on first use: torch takes seconds, and --help does not need it.
_HOMES = {
    "Blueprint": "core.network", "Callback": "run.callbacks", "DataSet": "data.sets",
    "Fitted": "fitting.fit", "Split": "data.sets", "TreeNetwork": "models.pretrained",
    "fit": "fitting.fit",
}  # fmt: skip


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
