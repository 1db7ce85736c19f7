"""What a cluster has, and what an actor asks of it. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from treeprop_ray.config import Settings


@dataclass(frozen=True)
class Seat:
    """A device that an actor may have: a GPU, or a core."""

    node: int
    speed: float
    gpu: bool
    id: str = ""  # Ray's name of the node


@dataclass(frozen=True)
class Cluster:
    """What the cluster has: the CPUs and GPUs of each Ray node."""

    nodes: tuple[tuple[float, float], ...]  # (cpus, gpus)
    speeds: tuple[float, ...] = ()  # of a device of each node beside the others; empty: all alike
    ids: tuple[str, ...] = ()  # Ray's names of the nodes, where speeds differ

    @property
    def cpus(self) -> float:
        """All CPUs."""
        return sum(cpus for cpus, _ in self.nodes)

    @property
    def gpus(self) -> float:
        """All GPUs."""
        return sum(gpus for _, gpus in self.nodes)

    @property
    def devices(self) -> int:
        """GPUs, or CPU cores when there are no GPUs."""
        return int(self.gpus or self.cpus)

    @property
    def seats(self) -> list[Seat]:
        """A seat for every device, the fastest first. Cores of a machine without GPUs count beside
        GPUs only where their speed is said."""
        made = []
        for k, (cpus, gpus) in enumerate(self.nodes):
            speed = self.speeds[k] if self.speeds else 1.0
            idle = speed == 0 or (self.gpus > 0 and not gpus and not self.speeds)
            count = 0 if idle else int(gpus or cpus)
            made += [Seat(k, speed, gpus > 0, self.ids[k] if self.ids else "")] * count
        return sorted(made, key=lambda seat: -seat.speed)

    def __str__(self) -> str:
        each = ", ".join(f"{c:g} CPU + {g:g} GPU" for c, g in self.nodes)
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs ({each})"


def resources(settings: Settings, actors: int, cluster: Cluster) -> tuple[float, float]:
    """CPUs and GPUs of one actor; what is not set is an equal share, at most one of each."""
    cpus, gpus = settings.cpus_per_actor, settings.gpus_per_actor
    if settings.device == "cuda" and cluster.gpus == 0:
        raise UserError(f"device=cuda: the cluster has {cluster}; use device=cpu or auto")
    if gpus < 0:
        use_gpu = cluster.gpus > 0 and settings.device != "cpu"
        gpus = share([g for _, g in cluster.nodes], actors) if use_gpu else 0.0
    if cpus == 0:
        cpus = share([c for c, _ in cluster.nodes], actors)
    return cpus, gpus


def share(have: Sequence[float], actors: int) -> float:
    """The largest of 1, 1/2, 1/3, … that lets all actors fit; an actor lives on one Ray node."""
    for parts in range(1, actors + 1):
        if sum(int(h) * parts for h in have) >= actors:
            return 1.0 if parts == 1 else int(10000 / parts) / 10000  # Ray counts in 1/10000
    return 1.0
