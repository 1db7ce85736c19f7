"""What the parts of a network cost: seconds, parameters, bytes. Pure Python.

Times are those of a device of speed 1. A part takes a constant and a share for every sample: small
pieces of a batch are less than proportionally fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from treeprop_ray.core.grouping import Grouping
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Edge, Tree

STATE_BYTES = 4  # of a number in a state: float32, also when the blocks compute in bf16
TRAIN_BYTES = 16  # of a parameter: weight, gradient, two moments of Adam, float32
GRAPH_BYTES = 34  # per token and width that a block keeps for its backward (bf16, flash)
BACKWARD = 2  # a backward over a forward: gradients of input and of weights


@dataclass(frozen=True)
class Part:
    """A block, the stem or the head."""

    fixed: float = 0.0  # seconds of a forward, however few samples
    each: float = 0.0  # seconds more for every sample
    parameters: float = 0.0
    graph: float = 0.0  # bytes that wait for the backward, for every sample

    def forward(self, samples: float) -> float:
        """Seconds of a forward."""
        return self.fixed + self.each * samples

    @classmethod
    def mean(cls, parts: Iterable[Part]) -> Part:
        """A part like the average of some."""
        rows = [(p.fixed, p.each, p.parameters, p.graph) for p in parts]
        return cls(*(math.fsum(column) / len(rows) for column in zip(*rows, strict=True)))

    def times(self, count: int) -> Part:
        """So many in a row."""
        return Part(*(count * x for x in (self.fixed, self.each, self.parameters, self.graph)))


@dataclass(frozen=True)
class Workload:
    """A step: a tree of blocks, the rule of its nodes, and a batch."""

    tree: Tree
    batch: int  # samples
    blocks: Mapping[Edge, Part]  # of all edges before the head
    head: Part
    state: float  # bytes of a state or adjoint, for every sample
    stem: Part = Part()
    rule: Rule = field(default_factory=lambda: Rule(objective="node"))
    note: str = ""  # where the figures come from

    @classmethod
    def even(
        cls, tree: Tree, batch: int, block: Part, head: Part, state: float, **rest: object
    ) -> Workload:
        """Equal layers."""
        blocks = {e: block.times(tree.layers(e)) for e in tree.blocks if e != tree.head}
        return cls(tree, batch, blocks, head, state, **rest)  # type: ignore[arg-type]

    def part(self, edge: Edge) -> Part:
        """The part of an edge."""
        return self.head if edge[1] == self.tree.N else self.blocks[edge]

    def shared(self, copies: int) -> Workload:
        """What one of so many copies has to do."""
        return replace(self, batch=self.batch // copies)

    @property
    def block(self) -> Part:
        """The average block of the chain."""
        chain = self.tree.path_edges(self.tree.chain)[:-1]
        return Part.mean(self.blocks[edge] for edge in chain)

    def resized(self, N: int) -> Workload:
        """The same with a chain of N average blocks (the head counts)."""
        if N == self.tree.N:
            return self
        tree = Tree(N, self.tree.split)
        rest = {"stem": self.stem, "rule": self.rule, "note": self.note}
        return Workload.even(tree, self.batch, self.block, self.head, self.state, **rest)


@dataclass(frozen=True)
class Device:
    """Speed of a device: `peak` FLOP/s times `share`, less for small batches."""

    peak: float = 312e12
    share: float = 0.4
    half: float = 1024.0  # tokens at which a kernel reaches half of the share

    def part(self, flops: float, tokens: float, parameters: float, graph: float) -> Part:
        """A part whose forward of a sample (of so many tokens) has so many FLOP."""
        each = flops / (self.peak * self.share)
        return Part(each * self.half / tokens, each, parameters, graph)


@dataclass(frozen=True)
class Network:
    """A chain of N equal Transformer layers, the last with a language-model head, and a batch.

    `grouping` says how many layers the tree's blocks have; one each without it.
    """

    N: int
    width: int = 1280
    vocabulary: int = 50257
    tokens: int = 1024  # of a sequence
    batch: int = 64  # sequences
    grouping: Grouping | None = None

    @property
    def tree(self) -> Tree:
        """The tree over its blocks."""
        return Tree(self.grouping.N if self.grouping else self.N, grouping=self.grouping)

    @property
    def block_parameters(self) -> float:
        return 12 * self.width**2 + 13 * self.width

    @property
    def head_parameters(self) -> float:
        """One more set of block weights, and the embeddings, which stem and head share."""
        return self.block_parameters + (self.vocabulary + self.tokens) * self.width

    @property
    def block_flops(self) -> float:
        """Forward of one block, for every sequence: matrices, and causal attention."""
        return self.tokens * (24 * self.width**2 + 2 * self.tokens * self.width)

    @property
    def head_flops(self) -> float:
        """Forward of the last block with the language-model head."""
        return self.block_flops + 2 * self.tokens * self.vocabulary * self.width

    def on(self, device: Device) -> Workload:
        """What a step costs on a device; a state is float32, a block keeps its graph."""
        numbers = self.tokens * self.width
        graph = GRAPH_BYTES * numbers
        block = device.part(self.block_flops, self.tokens, self.block_parameters, graph)
        head = device.part(self.head_flops, self.tokens, self.head_parameters, graph)
        return Workload.even(self.tree, self.batch, block, head, STATE_BYTES * numbers)
