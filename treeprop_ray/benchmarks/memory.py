"""How many bytes of tensors live at the same time: a count, not a reading of the process."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from treeprop_ray.core.optim import PartOptimizer


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside it, from making to freeing, by owner, and
    the floating-point operations of the products that torch can count.

    Workspace inside an operator is not seen; weights and optimizer state that were there before
    are not counted (`resident` counts those).
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.owner: Any = None
        self.live: Counter[Any] = Counter()
        self.peak: Counter[Any] = Counter()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def charge(self, owner: Any) -> Iterator[None]:
        """What is made inside belongs to `owner`."""
        before, self.owner = self.owner, owner
        try:
            yield
        finally:
            self.owner = before

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tree_map_only(Tensor, lambda t: self._known.add(t.untyped_storage()), (args, kwargs))
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, out)
        packet: Any = getattr(func, "overloadpacket", None)
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out

    def _note(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage not in self._known and t.device.type != "meta":
            self._known.add(storage)
            size, owner = storage.nbytes(), self.owner
            self.live[owner] += size
            self.peak[owner] = max(self.peak[owner], self.live[owner])
            weakref.finalize(storage, self._gone, owner, size)
        return t

    def _gone(self, owner: Any, size: int) -> None:
        self.live[owner] -= size


def resident(optimizer: PartOptimizer) -> int:
    """Bytes of the weights and of the optimizer's state (two slots for Adam)."""
    weights = [p for named in optimizer.params.values() for p in named.values()]
    state = optimizer.state().values()
    return sum(t.numel() * t.element_size() for t in (*weights, *state))
