"""TreeNetwork: blocks on the edges of a tree, built from a list of blocks; paths and the chain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core.grouping import Grouping, grouping, sizes_of
from treeprop_ray.core.inputs import Inputs
from treeprop_ray.core.own_blocks import (
    check_exits,
    check_modules,
    check_probabilities,
    check_shape,
    check_unshared,
    default_auxiliary,
    made_by,
    named_blocks,
    probe_shapes,
    with_exits,
)
from treeprop_ray.core.packed import form_of, packed
from treeprop_ray.core.rng import seeded
from treeprop_ray.core.states import Path, Spec, Stack, spec_of
from treeprop_ray.core.tree import SPLITS, Edge, Tree
from treeprop_ray.errors import UserError

FAMILIES = ("gaussian", "bernoulli")
STEM: Edge = (-1, 0)  # the stem is treated as the edge into z_0


def edge_name(edge: Edge) -> str:
    """How an edge is called in checkpoints and state dicts: `stem`, `4-6`."""
    return "stem" if edge == STEM else f"{edge[0]}-{edge[1]}"


def named(parts: Mapping[Edge, nn.Module]) -> dict[str, nn.Module]:
    """Parts by the names of their edges."""
    return {edge_name(edge): module for edge, module in parts.items()}


def edge_of(name: str) -> Edge:
    """The edge of a name."""
    if name == edge_name(STEM):
        return STEM
    l, _, r = name.partition("-")
    return int(l), int(r)


def part_state(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of one part out of a state whose keys are `<part>/<tensor>`."""
    prefix = f"{name}/"
    return {key[len(prefix) :]: state[key] for key in state if key.startswith(prefix)}


@dataclass(frozen=True)
class Shape:
    """What a model must know of the data."""

    input_shape: tuple[int, ...]
    classes: int
    dtype: torch.dtype
    form: Inputs | None = None  # where a sample has several tensors


@dataclass(frozen=True)
class Blueprint:
    """How to make each part of a network. Every part is made alone, by whoever owns it."""

    N: int
    stem: Callable[[], nn.Module]
    block: Callable[[int, int], nn.Module]  # (l, r) with r < N; r - l > 1 is auxiliary
    head: Callable[[], nn.Module]
    family: str = "gaussian"
    tie: Callable[[nn.Module, nn.Module], None] | None = None  # (stem, head): shared weights
    context: Any = None  # what the stem gives besides z_0, anything in place of its tensors
    grouping: Grouping | None = None  # layers in the tree's blocks; `block` then makes a layer
    plain: bool = True  # every block gives one tensor; False: one gives a tuple or a dict

    def grouped(self, grouping: Grouping | None) -> Blueprint:
        """The same network over a tree whose blocks have several layers."""
        return replace(self, N=grouping.N, grouping=grouping) if grouping else self

    def tree(self, split: str) -> Tree:
        """The tree over its blocks."""
        return Tree(self.N, split, self.grouping)

    def build(self, edge: Edge, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The freshly initialised block of an edge; depends on (seed, edge) only."""
        grouping = self.grouping
        if edge == STEM:
            return self._make(edge, self.stem, seed, dtype)
        if edge[1] == self.N:
            return self._make(grouping.head if grouping else edge, self.head, seed, dtype)
        if grouping is None:
            return self._make(edge, partial(self.block, *edge), seed, dtype)
        layers = grouping.layers(edge)
        return stacked({e: self._make(e, partial(self.block, *e), seed, dtype) for e in layers})

    def _make(
        self, edge: Edge, make: Callable[[], nn.Module], seed: int, dtype: torch.dtype
    ) -> nn.Module:
        with seeded(seed, "init", edge_name(edge)):
            return make().to(dtype)

    def build_all(
        self, edges: Sequence[Edge], seed: int, dtype: torch.dtype = torch.float32
    ) -> dict[Edge, nn.Module]:
        """The parts of some edges; stem and head are tied when both are among them."""
        made = {edge: self.build(edge, seed, dtype) for edge in edges}
        check_unshared(named(made))
        head = (self.N - 1, self.N)
        if self.tie and STEM in made and head in made:
            self.tie(made[STEM], made[head])
        return made

    def parts(self, names: Sequence[str], seed: int, dtype: torch.dtype) -> dict[str, nn.Module]:
        """The parts of some names."""
        return named(self.build_all([edge_of(name) for name in names], seed, dtype))

    @property
    def spec(self) -> Spec | None:
        """The structure of the stem's context."""
        return None if self.context is None else spec_of(self.context)

    @property
    def stem_trains(self) -> bool:
        """Whether the stem has weights to train; nothing is allocated."""
        with torch.device("meta"):
            return any(p.requires_grad for p in self.build(STEM, 0).parameters())

    def count_parameters(self, name: str) -> int:
        """Numbers in a part; nothing is allocated."""
        with torch.device("meta"):
            return count_parameters(self.build(edge_of(name), 0))


def stacked(layers: Mapping[Edge, nn.Module]) -> Stack:
    """Layers as one block."""
    return Stack(OrderedDict((edge_name(edge), layer) for edge, layer in layers.items()))


class TreeNetwork(nn.Module):
    """All blocks of a tree in one module, keyed by edge."""

    inputs: tuple[str, ...] = ()  # what the stem takes, where it takes several tensors by name

    def __init__(
        self,
        tree: Tree,
        stem: nn.Module,
        blocks: dict[Edge, nn.Module],
        family: str,
        context: Spec | None = None,
        plain: bool = True,
    ) -> None:
        """`context`: the structure of what the stem gives besides z_0; `plain`: there is none, and
        every block takes and gives one tensor."""
        super().__init__()
        self.context, self.plain = context, plain and context is None
        self.tree, self.family = tree, family
        self.cast: torch.dtype | None = None  # run paths under autocast when scoring
        self.stem = stem
        self.edges = nn.ModuleDict({edge_name(e): blocks[e] for e in tree.blocks})

    @classmethod
    def from_blueprint(
        cls, blueprint: Blueprint, tree: Tree, seed: int, dtype: torch.dtype = torch.float32
    ) -> TreeNetwork:
        """Build every part; the same weights wherever and in whatever order parts are built."""
        parts = blueprint.build_all([STEM, *tree.blocks], seed, dtype)
        stem = parts.pop(STEM)
        return cls(tree, stem, parts, blueprint.family, blueprint.spec, blueprint.plain)

    @classmethod
    def from_blocks(
        cls,
        stem: nn.Module | None,
        blocks: Sequence[nn.Module] | nn.Sequential,
        head: nn.Module,
        *,
        example: Any,
        split: str = "floor",
        family: str = "gaussian",
        group: int | Sequence[int] = 1,
        auxiliary_layers: int = 1,
        auxiliary: Callable[[int, int], nn.Module] | None = None,
        exits: Mapping[int, nn.Module] | Callable[[int], nn.Module | None] | None = None,
        seed: int = 1,
    ) -> TreeNetwork:
        """A tree over your own blocks.

        `example` is one small input batch (a dict or tuple of tensors where samples have several);
        it is sent through once to check every shape.
        `auxiliary(l, r)` makes the block of a longer edge z_l -> z_r; by default a freshly
        initialised copy of one of the blocks with that input and output shape. With `group` (how
        many, or [2, 2, 3] one by one) several of `blocks` are one block of the tree, and auxiliary
        blocks have `auxiliary_layers` layers, each made by auxiliary(l, r) with l and r counting
        `blocks`; paths show them one by one. A stem may return
        (z_0, context) with what all blocks need besides their state (core/states.py); a block that
        returns a tuple gives its state first, in a dict it is `state` or `hidden_states`. A stem
        that returns a dict, or (dict or tuple, context), makes states of several tensors, which
        every block takes and returns (core/packed.py). Where the shapes of states differ along the
        chain, `exits` brings a state that ends a short path into the form the head takes: a module
        for its index, {2: pool}, or a function of the index.
        """
        chain = list(blocks)
        if not chain:
            raise UserError("blocks=[]: at least one block before the head")
        stem = stem if stem is not None else nn.Identity()
        named_parts = {"stem": stem, **named_blocks(chain), "head": head}
        check_modules(named_parts, example)
        check_unshared(named_parts)
        if family not in FAMILIES:
            raise UserError(f"family={family}: one of {', '.join(FAMILIES)}")
        tree = grouped_tree(len(chain), split, group, auxiliary_layers)
        if form := form_of(stem, example):
            if exits:
                raise UserError("exits=…: is for states of one tensor, the stem gives several")
            stem, chain, head, auxiliary = packed(stem, chain, head, auxiliary, form)
        states, context, plain = probe_shapes(stem, chain, head, example)
        if family == "bernoulli":
            check_probabilities(states)

        def layer(edge: Edge, in_chain: bool) -> nn.Module:
            if in_chain:
                return chain[edge[0]]
            with seeded(seed, "init", edge_name(edge)):
                if auxiliary:
                    made = made_by(auxiliary, edge)
                else:
                    made = default_auxiliary(chain, states, edge)
            what, (z_in, z_out) = f"auxiliary block {edge_name(edge)}", (states[i] for i in edge)
            check_shape(made, what, z_in, z_out, context)
            return made

        blocks_of = tree_blocks(tree, layer)
        at = [states[i] for i in tree.grouping.cuts] if tree.grouping else states
        blocks_of[tree.head] = with_exits(head, exits, tree, at) if exits else head
        check_unshared(named({STEM: stem, **blocks_of}))
        check_exits(blocks_of[tree.head], tree, at)
        spec = None if context is None else spec_of(context)
        made = cls(tree, stem, blocks_of, family, spec, plain)
        made.inputs = tuple(example) if isinstance(example, Mapping) else ()
        return made

    def reads(self, inputs: Inputs | None) -> None:
        """Samples have these tensors (None: one); UserError where an input is missing."""
        given = inputs.names if inputs else ()
        if missing := [name for name in self.inputs if name not in given]:
            has = inputs or "one tensor"
            raise UserError(f"columns: the stem takes {', '.join(missing)} too, samples have {has}")

    def block(self, edge: Edge) -> nn.Module:
        """The block that serves an edge (the head for every edge that ends at N)."""
        return self.stem if edge == STEM else self.edges[edge_name(self.tree.block_of(edge))]

    def parts(self) -> dict[Edge, nn.Module]:
        """Every distinct part with its edge: stem, blocks, head."""
        return {STEM: self.stem, **{edge: self.block(edge) for edge in self.tree.blocks}}

    def path(self, indices: Sequence[int]) -> nn.Sequential:
        """The plain network along a path such as [0, 4, 6, 7, 8]; shares weights with the tree."""
        parts = [("stem", self.stem)]
        for edge in self.tree.path_edges(indices):
            block = self.block(edge)
            if isinstance(block, Stack):  # layer by layer
                parts += list(block.named_children())
            else:
                grouping = self.tree.grouping
                parts.append((edge_name(grouping.head if grouping else edge), block))
        return (nn.Sequential if self.plain else Path)(OrderedDict(parts))

    def chain(self) -> nn.Sequential:
        """The deployed network: stem, blocks 1..N-1, head."""
        return self.path(self.tree.chain)

    def forward(self, x: Tensor) -> Tensor:
        """The deployed chain."""
        out: Tensor = self.chain()(x)
        return out


def grouped_tree(
    layers: int, split: str, group: int | Sequence[int], auxiliary_layers: int
) -> Tree:
    """The tree over a chain of so many layers, several of which may be one block."""
    if split not in SPLITS:
        raise UserError(f"split={split}: one of {', '.join(SPLITS)}")
    group = [group] if isinstance(group, int) else list(group)
    if min([*group, auxiliary_layers], default=1) < 1:
        raise UserError(f"group={group} auxiliary_layers={auxiliary_layers}: at least 1")
    chosen = grouping(sizes_of(group, layers), auxiliary_layers)
    return Tree(chosen.N if chosen else layers + 1, split, chosen)


def tree_blocks(tree: Tree, layer: Callable[[Edge, bool], nn.Module]) -> dict[Edge, nn.Module]:
    """The blocks of a tree but the head, of layers that `layer(edge, whether in the chain)` makes;
    the edge counts single layers."""
    blocks: dict[Edge, nn.Module] = {}
    for edge in tree.blocks:
        in_chain = edge[1] - edge[0] == 1
        if edge == tree.head:
            continue
        if tree.grouping is None:
            blocks[edge] = layer(edge, in_chain)
        else:
            blocks[edge] = stacked({e: layer(e, in_chain) for e in tree.grouping.layers(edge)})
    return blocks


def count_parameters(module: nn.Module) -> int:
    """Distinct trainable numbers in a module."""
    return sum(p.numel() for p in module.parameters())
