"""Tensors from GPU to GPU for transport=stream: torch.distributed point to point (nccl).

The links (links.py) say what comes; the bytes go from device to device. There is a group for each
direction: on one stream a send would stand in front of a receive that the other side waits for.
nccl joins two processes at their first packet, and both must be there; so all pairs greet each
other once, in one order, before the first step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from treeprop_ray.core import devices
from treeprop_ray.engine.links import Address, WireBroken
from treeprop_ray.errors import first_line

Rendezvous = tuple[str, int]  # where the driver's store is


def gpu_of(device: torch.device) -> str:
    """Which GPU that is, the same for all processes that use it; empty for a CPU."""
    return devices.gpus.uuid(device) if devices.gpus.is_gpu(device) else ""


def partners(rank: int, addresses: Sequence[Address], peers: Sequence[int]) -> list[int]:
    """The peers with a GPU of their own, if this process has one; nccl does not join processes
    that share a GPU."""
    mine = addresses[rank].gpu
    return [peer for peer in peers if mine and addresses[peer].gpu not in ("", mine)]


class Direct:
    """This process's end of the ways from device to device."""

    def __init__(
        self,
        backend: str,
        rank: int,
        world: int,
        rendezvous: Rendezvous,
        session: str,
        patience: float,
        device: torch.device,
    ) -> None:
        store = TCPStore(*rendezvous, timeout=timedelta(seconds=patience))
        self.rank, self.device = rank, device
        self.partners: set[int] = set()
        self.under_way: deque[tuple[Any, Tensor]] = deque()  # sends, and the memory they read
        self.up, self.down = (
            group_of(backend, PrefixStore(f"{session}-{way}", store), rank, world, patience)
            for way in ("up", "down")
        )

    def greet(self, partners: Sequence[int]) -> None:
        """Join all partners: a number there and one back, the pairs in one order everywhere."""
        self.partners = set(partners)
        for partner in sorted(partners, key=lambda p: (min(p, self.rank), max(p, self.rank))):
            number = torch.zeros(1, device=self.device)
            for sends in (self.rank < partner, self.rank > partner):
                if sends:
                    self.send(partner, number)
                else:
                    self.receive(partner, number.clone())

    def send(self, peer: int, t: Tensor) -> None:
        """Hand a tensor over; does not wait."""
        while self.under_way and self.under_way[0][0].is_completed():
            self.under_way.popleft()
        try:
            way = self.up if peer > self.rank else self.down
            self.under_way.append((way.send([t], peer, 0), t))
        except RuntimeError as e:
            raise WireBroken(first_line(e)) from e

    def receive(self, peer: int, target: Tensor) -> Tensor:
        """The next tensor of a peer; on a GPU its stream waits, not this process."""
        try:
            way = self.down if peer > self.rank else self.up
            way.recv([target], peer, 0).wait()
        except RuntimeError as e:
            raise WireBroken(first_line(e)) from e
        return target

    def close(self) -> None:
        """Leave; what is under way is given up."""
        self.under_way.clear()
        for way in (self.up, self.down):
            way.abort()


def group_of(backend: str, store: Any, rank: int, world: int, patience: float) -> Any:
    """A group of all processes."""
    timeout = timedelta(seconds=patience)
    if backend == "gloo":
        return distributed.ProcessGroupGloo(store, rank, world, timeout)
    return devices.gpus.group(store, rank, world, timeout)
