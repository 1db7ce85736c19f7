"""reduce=fast: the copies of a host add up their gradients by an all-reduce of torch.distributed.

One group for the copies of each host: nccl where every copy has a GPU of its own, else gloo. The
copies meet at a store of the driver's; whoever is lost is noticed by the others, who say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from treeprop_ray.engine.direct import Rendezvous, group_of
from treeprop_ray.errors import ActorLost, first_line


def backend_of(gpus: Sequence[str]) -> str:
    """What joins processes with these GPUs; nccl does not join processes that share one."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def meeting_at(place: Rendezvous, session: str, patience: float) -> Store:
    """The driver's store, for one session."""
    return PrefixStore(session, TCPStore(*place, timeout=timedelta(seconds=patience)))


class Together:
    """One copy's end of the group."""

    def __init__(self, backend: str, rank: int, world: int, store: Store, patience: float) -> None:
        self.backend = backend
        self.group = group_of(backend, store, rank, world, patience)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make tensors, of the same shapes in all copies, the sums over all copies."""
        kinds = sorted({t.dtype for t in tensors}, key=str)
        for kind in kinds:
            mine = [t for t in tensors if t.dtype == kind]
            flat = torch.cat([t.reshape(-1) for t in mine])
            flat = flat.cpu() if self.backend == "gloo" else flat
            try:
                self.group.allreduce([flat]).wait()
            except RuntimeError as e:
                raise ActorLost(f"a copy is gone: {first_line(e)}") from e
            for t, sums in zip(mine, flat.split([t.numel() for t in mine]), strict=True):
                t.copy_(sums.view(t.shape))

    def close(self) -> None:
        """Leave the group."""
        self.group.abort()
