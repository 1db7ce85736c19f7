"""TreeProp on Ray: train the blocks of a deep network as a binary tree, deploy the plain chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treeprop_ray.fitting import fit
    from treeprop_ray.network import TreeNetwork

__version__ = "0.1.0"
__all__ = ["TreeNetwork", "fit"]


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and --help does not need it."""
    if name == "TreeNetwork":
        from treeprop_ray.network import TreeNetwork

        return TreeNetwork
    if name == "fit":
        from treeprop_ray.fitting import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
