"""What hosts of blocks share, whether in a tree or in a chain: a block or the head, evaluated."""

from __future__ import annotations

import torch
from torch import Tensor

from treeprop_ray.core.network import STEM, edge_name
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.scoring import Counts, count
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.data.batches import Which
from treeprop_ray.hosts.base import Host, Share


class BlockHost(Host):
    """Some blocks of a network, by edge."""

    def __init__(self, share: Share, tree: Tree, rule: Rule) -> None:
        self.tree, self.rule = tree, rule
        super().__init__(share)

    @torch.no_grad()
    def opened(self, which: Which) -> tuple[Tensor, Tensor]:
        """z_0 and the labels of a batch, for an evaluation."""
        assert self.batches is not None
        x, y = self.batches.get(which)
        return self.through(STEM, x), y

    @torch.no_grad()
    def through(self, edge: Edge, z: Tensor) -> Tensor:
        """A block in evaluation mode: no noise, no dropout."""
        self.catch_up()
        module = self.parts[edge_name(edge)]
        module.eval()
        with self.autocast():
            out = self.tried(lambda: module(z.to(self.device)))
        module.train()
        return out

    @torch.no_grad()
    def score(self, z: Tensor, y: Tensor) -> Counts:
        """Summed cross-entropy, number of correct labels and number of labels at the head."""
        self.catch_up()
        head = self.parts[edge_name(self.tree.head)].eval()
        with self.autocast():
            counts = self.tried(lambda: count(head, z.to(self.device), y))
        head.train()
        return counts
