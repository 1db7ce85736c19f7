"""The outside peer: the same blocks on torch.distributed.pipelining, in processes of its own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from treeprop_ray import config
from treeprop_ray.benchmarks.memory import Meter, resident
from treeprop_ray.benchmarks.random_data import random_images, random_job
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.optim import PartOptimizer
from treeprop_ray.schedule.placement import stages

SCHEDULES = ("GPipe", "1F1B")


class Stage:
    """One process: a run of blocks, its optimizer, and the schedules over them."""

    def __init__(self, rank: int, processes: int, words: list[str], pieces: int) -> None:
        job = random_job(config.load(words), random_images())
        mine = stages(job.tree, processes)[rank]
        self.parts = job.parts([edge_name(edge) for edge in ([STEM] if rank == 0 else []) + mine])
        self.module = nn.Sequential(*self.parts.values())
        self.optimizer = PartOptimizer(self.parts, job.optimizer)
        self.batches, self.first = job.batches(), rank == 0
        makers = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
        self.schedules: dict[str, Any] = {}
        for name in SCHEDULES:  # a stage keeps buffers, so each schedule has its own
            stage = pipelining.PipelineStage(self.module, rank, processes, torch.device("cpu"))
            self.schedules[name] = makers[name](stage, pieces, F.cross_entropy)

    def step(self, name: str, step: int) -> None:
        """One training step."""
        x, y = self.batches(step)
        if self.first:
            self.schedules[name].step(x)
        else:
            self.schedules[name].step(target=y, losses=[])
        self.optimizer.step(step, None)

    def peak(self, name: str, step: int) -> int:
        """Peak bytes of a step: weights, optimizer state and what the step makes."""
        with Meter() as meter:
            self.step(name, step)
        return resident(self.optimizer) + meter.peak[None]

    def weights(self) -> dict[str, Any]:
        """Weights by part."""
        return {
            f"{name}/{k}": v.detach().numpy()
            for name, part in self.parts.items()
            for k, v in part.state_dict().items()
        }


def serve(rank: int, processes: int, store: str, words: list[str], pieces: int, pipe: Any) -> None:
    """The life of a process: do what the pipe asks, until it asks for nothing."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
    )
    stage = Stage(rank, processes, words, pieces)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        question, *rest = asked
        pipe.send(getattr(stage, question)(*rest))
    distributed.destroy_process_group()


class Peer:
    """Two processes that train by torch's own pipeline schedules."""

    def __init__(self, words: list[str], pieces: int, processes: int = 2) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(processes):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(
                target=serve, args=(rank, processes, store, words, pieces, theirs), daemon=True
            )
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self._answers()

    def ask(self, *question: Any) -> list[Any]:
        """Ask all processes at once; their answers by rank."""
        for pipe in self.pipes:
            pipe.send(question)
        return self._answers()

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)
        self.folder.cleanup()
