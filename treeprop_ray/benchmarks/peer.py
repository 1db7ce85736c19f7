"""The outside peers: the same blocks on torch.distributed.pipelining, or in
DistributedDataParallel, in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from treeprop_ray import config
from treeprop_ray.benchmarks.alarm import Alarm
from treeprop_ray.benchmarks.memory import Meter, resident
from treeprop_ray.benchmarks.random_data import random_images, random_job
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.optim import PartOptimizer
from treeprop_ray.errors import TrainingError
from treeprop_ray.schedule.placement import stages

SCHEDULES = {  # torch's name, and whether a process has two stages, the second on the way back (V)
    "GPipe": (pipelining.ScheduleGPipe, False),
    "1F1B": (pipelining.Schedule1F1B, False),
    "zero bubble": (pipelining.schedules.ScheduleZBVZeroBubble, True),
}
DDP = "DDP"  # the whole chain in every process, with a share of the batch


def suits(name: str, pieces: int, processes: int = 2) -> bool:
    """Whether torch has the schedule for so many pieces: 1F1B wants one per stage at least."""
    return name != "1F1B" or pieces >= processes


class Network(Protocol):
    """What the processes train."""

    def runs(self, count: int) -> list[list[str]]:
        """The parts of the chain, cut into `count` runs."""

    def parts(self, names: list[str]) -> dict[str, nn.Module]:
        """Some of the parts."""

    def optimizer(self, parts: dict[str, nn.Module]) -> PartOptimizer | None:
        """Their optimizer."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Samples and targets."""

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        """The mean over the samples."""


class Images:
    """The network of some settings, on random images."""

    def __init__(self, words: list[str]) -> None:
        self.job = random_job(config.load(words), random_images())
        self.batches = self.job.batches()

    def runs(self, count: int) -> list[list[str]]:
        runs = [[edge_name(edge) for edge in run] for run in stages(self.job.tree, count)]
        runs[0].insert(0, edge_name(STEM))
        return runs

    def parts(self, names: list[str]) -> dict[str, nn.Module]:
        return dict(self.job.parts(names))

    def optimizer(self, parts: dict[str, nn.Module]) -> PartOptimizer | None:
        return PartOptimizer(parts, self.job.optimizer)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.batches(step)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target)


class _Sleep(torch.autograd.Function):
    """A unit forward, one for the gradient of the input and one for that of the weights."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, unit: float, sleep: Callable[[float], object]
    ) -> Tensor:
        ctx.seconds, ctx.sleep = unit * len(z), sleep
        sleep(ctx.seconds)
        return z + 0 * weight

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (slope,) = slopes
        of_z, of_weight, *_ = ctx.needs_input_grad
        ctx.sleep(ctx.seconds * (of_z + of_weight))
        return slope if of_z else None, slope.sum().view(1) if of_weight else None, None, None


class Sleeper(nn.Module):
    """A block that takes `unit` seconds for a sample and computes nothing."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit, self.weight, self.sleep = unit, nn.Parameter(torch.zeros(1)), Alarm()

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(z, self.weight, self.unit, self.sleep)
        return out


class Sleepers:
    """A chain of blocks of `seconds` for a batch of so many samples."""

    def __init__(self, blocks: int, seconds: float, samples: int) -> None:
        self.blocks, self.seconds, self.samples = blocks, seconds, samples

    def runs(self, count: int) -> list[list[str]]:
        each = self.blocks // count
        return [[str(each * k + i) for i in range(each)] for k in range(count)]

    def parts(self, names: list[str]) -> dict[str, nn.Module]:
        return {name: Sleeper(self.seconds / self.samples) for name in names}

    def optimizer(self, parts: dict[str, nn.Module]) -> PartOptimizer | None:
        return None

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        # the first block needs a gradient too, as in our chain, whose stem trains
        return torch.zeros(self.samples, 1, requires_grad=True), torch.zeros(self.samples, 1)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target)


class Stage:
    """One process: its blocks in a schedule of torch's, and their optimizer."""

    def __init__(self, name: str, rank: int, processes: int, network: Network, pieces: int) -> None:
        maker, two = SCHEDULES[name]
        count = processes * (2 if two else 1)
        self.indices = [rank, count - 1 - rank] if two else [rank]
        runs = network.runs(count)
        self.parts = network.parts([part for k in self.indices for part in runs[k]])
        self.optimizer, self.network, self.count = network.optimizer(self.parts), network, count
        made = [
            pipelining.PipelineStage(
                nn.Sequential(*(self.parts[part] for part in runs[k])),
                k,
                count,
                torch.device("cpu"),
            )
            for k in self.indices
        ]
        self.schedule: Any = maker(made if two else made[0], pieces, network.loss)

    def step(self, step: int) -> None:
        """One training step."""
        x, y = self.network.batch(step)
        last = {"target": y, "losses": []} if self.count - 1 in self.indices else {}
        self.schedule.step(*([x] if 0 in self.indices else []), **last)
        if self.optimizer:
            self.optimizer.step(step, None)

    def peak(self, step: int) -> int:
        """Peak bytes of a step: weights, optimizer state and what the step makes."""
        with Meter() as meter:
            self.step(step)
        assert self.optimizer is not None
        return resident(self.optimizer) + meter.peak[None]

    def weights(self) -> dict[str, Any]:
        """Weights by part."""
        return {
            f"{name}/{k}": v.detach().numpy()
            for name, part in self.parts.items()
            for k, v in part.state_dict().items()
        }


class Worker:
    """One process of DistributedDataParallel: the whole chain, its places of the batch."""

    def __init__(self, rank: int, processes: int, network: Network) -> None:
        self.rank, self.processes, self.network = rank, processes, network
        names = network.runs(1)[0]
        parts = network.parts(names)
        self.module = nn.parallel.DistributedDataParallel(
            nn.Sequential(*(parts[name] for name in names))
        )
        self.optimizer = network.optimizer(parts)

    def step(self, step: int) -> None:
        """One training step; the mean over the workers is that over the batch."""
        x, y = (t.tensor_split(self.processes)[self.rank] for t in self.network.batch(step))
        self.network.loss(self.module(x), y).backward()
        if self.optimizer:
            self.optimizer.step(step, None)

    def weights(self) -> dict[str, Any]:
        """Weights in the order of the chain."""
        state = self.module.module.state_dict()
        return {k: v.detach().numpy() for k, v in state.items()}


def serve(
    rank: int, processes: int, store: str, network: Any, pieces: int, ddp: bool, pipe: Any
) -> None:
    """The life of a process: do what the pipe asks, until it asks for nothing."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
    )
    network = network()
    every: dict[str, Any] = {
        name: Stage(name, rank, processes, network, pieces)
        for name in SCHEDULES
        if suits(name, pieces, processes)
    }
    if ddp:
        every[DDP] = Worker(rank, processes, network)
    pipe.send(list(every))
    while (asked := pipe.recv()) is not None:
        name, question, *rest = asked
        pipe.send(getattr(every[name], question)(*rest))
    distributed.destroy_process_group()


class Peer:
    """Processes that train by torch's own means, each with weights of its own."""

    def __init__(self, network: Any, pieces: int, processes: int = 2, ddp: bool = False) -> None:
        """`network` makes a Network, in each process."""
        spawn = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(processes):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(
                target=serve,
                args=(rank, processes, store, network, pieces, ddp, theirs),
                daemon=True,
            )
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self.schedules: list[str] = self._answers()[0]

    def ask(self, *question: Any) -> list[Any]:
        """Ask all processes at once: schedule, method, words; their answers by rank."""
        try:
            for pipe in self.pipes:
                pipe.send(question)
        except OSError as e:
            raise TrainingError("a process of torch.distributed has ended") from e
        return self._answers()

    def _answers(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError) as e:
            raise TrainingError("a process of torch.distributed has ended") from e

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it may have ended
                pipe.send(None)
        for process in self.processes:
            process.join(30)
        self.folder.cleanup()
