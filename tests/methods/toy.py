"""A method in one file: every block learns to tell the classes apart by a fixed random readout.

No error travels and nobody waits for anybody: a block hands its detached output on and learns from
the cross-entropy of a random, untrained projection of it; the head learns by its own.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from treeprop_ray.config import Settings
from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.rng import generator
from treeprop_ray.core.rule import Piece
from treeprop_ray.core.tree import Tree
from treeprop_ray.hosts.base import Held, Share, there
from treeprop_ray.hosts.blocks import BlockHost
from treeprop_ray.methods.bp import ChainMethod
from treeprop_ray.methods.job import Job
from treeprop_ray.methods.outline import Outline
from treeprop_ray.schedule.ops import Call, Op, interleave, make_calls
from treeprop_ray.schedule.placement import Plan, stages


class LocalHost(BlockHost):
    def __init__(self, share: Share, job: Job) -> None:
        super().__init__(share, job.tree, job.rule)
        self.seed, self.labels = job.settings.seed, job.shape.classes
        self.verbs = {"open": self._open, "learn": self._learn, "head": self._head}

    def _open(self, op: Op, held: Held, piece: Piece) -> None:
        x, held["y"] = self.places(piece)
        held["z0"] = self.run_block(self.parts[edge_name(STEM)], x, 0).detach()

    def _learn(self, op: Op, held: Held, piece: Piece) -> None:
        block, z = self.parts[edge_name((op.n - 1, op.n))], there(held, op.reads[0])
        out = self.run_block(block, z, 0)
        flat = out.flatten(1)
        draws = generator(self.seed, "readout", op.n)
        readout = torch.randn(flat.shape[1], self.labels, generator=draws).to(flat)
        logits = (flat - flat.mean(0)) @ readout
        loss = F.cross_entropy(logits, there(held, "y"), reduction="sum") / piece.total
        loss.backward()
        self.note(op.n, "local", loss)
        held[op.writes[0]] = out.detach()

    def _head(self, op: Op, held: Held, piece: Piece) -> None:
        head, y = self.parts[edge_name(self.tree.head)], there(held, "y")
        loss_of = partial(head_loss, head, labels=y, piece=piece)
        loss = self.run_block(loss_of, there(held, op.reads[0]), 0)
        loss.backward()
        self.note(self.tree.N, "ce", loss)


class LocalLearning(ChainMethod):
    name = "toy"

    def calls(self, job: Job, plan: Plan) -> list[Call]:
        rows = []
        for k, cut in enumerate(stages(job.tree, len(plan.names))):
            ops = [Op("open", 0, (), ("z0", "y"))] if k == 0 else []
            for _, r in cut:
                last = r == job.tree.N
                writes = () if last else (f"z{r}",)
                ops.append(Op("head" if last else "learn", r, (f"z{r - 1}", "y"), writes))
            rows.append((k, "forward", k, {k: ops}))
        return interleave([make_calls(rows, m) for m in range(job.settings.microbatches)], 1)

    def host(self, job: Job, plan: Plan, index: int) -> LocalHost:
        names = self.residents(job.settings, plan, job.tree)[index].parts
        return LocalHost(job.share(names, plan, opens=index == 0), job)

    def outline(self, settings: Settings, tree: Tree) -> Outline:
        weights = {**{n: {"local": 1.0} for n in range(1, tree.N)}, tree.N: {"ce": 1.0}}
        return Outline(tree, {"full": tree.chain}, weights, self.deployed(tree), tree.N)
