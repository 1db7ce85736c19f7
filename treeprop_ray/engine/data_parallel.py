"""Backpropagation on several workers: torch's DistributedDataParallel over the same chain.

Every worker has the whole chain and takes its run of places of each batch; DDP averages the
gradients during the backward pass. The batch of a step is that of every other method, so the
number of workers changes nothing but rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.rule import Piece, cut
from treeprop_ray.core.scoring import Counts, Score
from treeprop_ray.data import Which
from treeprop_ray.engine.local import LocalEngine
from treeprop_ray.hosts.chain import ChainHost
from treeprop_ray.methods import Job


class ChainLoss(nn.Module):
    """The chain of a host and its loss as one module: what DDP needs to see."""

    def __init__(self, host: ChainHost) -> None:
        super().__init__()
        self.parts = nn.ModuleList(host.parts.values())  # DDP finds the parameters here
        self.host = [host]  # in a list: no module, and not to be found

    def forward(self, x: Tensor, y: Tensor, piece: Piece, counted: float) -> Tensor:
        """The piece's share of the mean loss of the whole batch."""
        (host,) = self.host
        host.at_hand = {}
        z = host.run_part(STEM, x, piece)
        for edge in host.blocks:
            z = host.run_part(edge, z, piece)
        head = host.tree.head
        loss_of = partial(
            head_loss,
            host.parts[edge_name(head)],
            labels=y,
            piece=piece,
            rule=host.rule.loss,
            counted=counted,
        )
        return host.run_part(head, z, piece, loss_of)


class DataParallelEngine(LocalEngine):
    """One worker of several (method=bp); a process group must be there."""

    host: ChainHost

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.rank, self.workers = distributed.get_rank(), distributed.get_world_size()
        self.model = DistributedDataParallel(ChainLoss(self.host))

    def gradients(self, step: int) -> None:
        """Loss and backward of this worker's places; gradients are averaged in the last piece."""
        mine = cut(step, self.job.places, self.workers)[self.rank]
        x, y = self.host.places(replace(mine, start=0, stop=mine.total))
        count = self.job.settings.pieces
        pieces = cut(step, mine.stop - mine.start, count)
        for piece in pieces:
            rows = slice(mine.start + piece.start, mine.start + piece.stop)
            # the index is this worker's alone, so dropout differs from that of the others
            own = replace(piece, index=self.rank * count + piece.index, total=mine.total)
            last = piece is pieces[-1]
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.model(x[rows], y[rows], own, self.host.counted())
                (loss * self.workers * self.host.scale()).backward()
            self.host.note(self.tree.N, "ce", loss)

    def _step(self, step: int, report: bool) -> None:
        self.gradients(step)
        if report:
            losses = self.host.losses[self.tree.N]
            total = losses.take()["ce"].clone()
            distributed.all_reduce(total)
            losses.add("ce", total)
        self._last = self.host.report(step, norms=report or self._needs_norms)
        self.host.apply(step, [self._last.square_norms])

    def _score(
        self, paths: Mapping[str, Sequence[int]], batches: Sequence[Which]
    ) -> dict[str, Score]:
        """Each worker scores some of the batches; the sums are added up."""
        (name,) = paths
        sums = torch.zeros(4, dtype=torch.float64, device=self.host.device)
        for which in batches[self.rank :: self.workers]:
            z, y, *context = self.host.opened(which)
            for edge in self.host.blocks:
                z = self.host.through(edge, z, *context)
            counts = self.host.score(z, y)
            sums += torch.tensor(counts, dtype=torch.float64, device=self.host.device)
        distributed.all_reduce(sums)
        return {name: Score.of([Counts(*sums.tolist())])}
