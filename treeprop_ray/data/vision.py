"""torchvision, importable beside any torch: use `from treeprop_ray.data.vision import v2`.

torchvision's wheel of the package index is built for CUDA. Beside a CPU torch its compiled library
does not load, and then even `import torchvision` fails, because it describes two operators that
nobody has defined. Image transforms need no compiled operator, so declaring the two is enough.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from treeprop_ray.errors import UserError

# Names and arguments as in torchvision's own C++ source (ops/nms.cpp, ops/quantized).
MISSING = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def compiled_library_loads(folder: Path) -> bool:
    """Whether torchvision's own operators can be had in this process."""
    for path in folder.glob("_C.*"):
        try:
            torch.ops.load_library(path)
        except OSError:
            continue
        return True
    return False


def declare_missing_operators() -> torch.library.Library | None:
    """Declare `torchvision::nms` and `::qnms` if the compiled library does not define them."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise UserError("torchvision is not installed: pip install torchvision")
    if compiled_library_loads(Path(spec.origin).parent):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, arguments in MISSING.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + arguments)
    return library


def prepared(kind: Callable[..., Any], *words: Any) -> Any:
    """kind(*words); a pickle that names this function imports this module first."""
    return kind(*words)


_declared = declare_missing_operators()  # lives as long as the process: it owns the declarations

from torchvision.transforms import v2  # noqa: E402

__all__ = ["prepared", "v2"]
