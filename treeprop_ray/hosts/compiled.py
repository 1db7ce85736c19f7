"""compile=true: the parts of a host compiled in place, each on its own.

The modules stay what they are, so checkpoints keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from treeprop_ray.errors import first_line, warn

VARIANTS = 256  # of all blocks: kinds of blocks, training or not, sizes of pieces, with adjoint

Result = TypeVar("Result")
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")  # whose errors are forgiven


def compiled_call(module: nn.Module, backend: str | Callable[..., Any]) -> Callable[..., Tensor]:
    """What `module(z)` does, compiled. Blocks of one structure share what was compiled for the
    first. (`module.compile()` would leave an nn.Sequential as it is.)"""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return torch.compile(call, backend=backend)


class Compiled:
    """Modules that are compiled until one of them fails."""

    def __init__(self, modules: Iterable[nn.Module], backend: str | Callable[..., Any]) -> None:
        self.modules = list(modules)
        self.backend = backend
        torch._dynamo.config.recompile_limit = VARIANTS
        torch._dynamo.config.accumulated_recompile_limit = 4 * VARIANTS
        torch._functorch.config.donated_buffer = False  # some graphs go back twice
        for module in self.modules:
            module._compiled_call_impl = compiled_call(module, backend)

    def guarded(self, run: Callable[[], Result]) -> Result:
        """Run a block; where it cannot be compiled, from now on all blocks run as they are."""
        try:
            return run()
        except Exception as e:
            if not (self.modules and type(e).__module__.startswith(COMPILER)):
                raise
            warn(f"compile=true: {self.backend} fails, so blocks run uncompiled: {first_line(e)}")
            self.stop()
            return run()

    def stop(self) -> None:
        """The modules as they were."""
        for module in self.modules:
            module._compiled_call_impl = None
        self.modules = []
