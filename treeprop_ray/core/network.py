"""TreeNetwork: blocks on the edges of a tree, built from a list of blocks; paths and the chain."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treeprop_ray.core.rng import seeded
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError

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
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Shape:
    """What a model must know of the data."""

    input_shape: tuple[int, ...]
    classes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Blueprint:
    """How to make each part of a network. Every part is made alone, by whoever owns it."""

    N: int
    stem: Callable[[], nn.Module]
    block: Callable[[int, int], nn.Module]  # (l, r) with r < N; r - l > 1 is auxiliary
    head: Callable[[], nn.Module]
    family: str = "gaussian"
    tie: Callable[[nn.Module, nn.Module], None] | None = None  # (stem, head): shared weights

    def build(self, edge: Edge, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The freshly initialised block of an edge; depends on (seed, edge) only."""
        with seeded(seed, "init", edge_name(edge)):
            if edge == STEM:
                module = self.stem()
            else:
                module = self.head() if edge[1] == self.N else self.block(*edge)
        return module.to(dtype)

    def build_all(
        self, edges: Sequence[Edge], seed: int, dtype: torch.dtype = torch.float32
    ) -> dict[Edge, nn.Module]:
        """The parts of some edges; stem and head are tied when both are among them."""
        made = {edge: self.build(edge, seed, dtype) for edge in edges}
        head = (self.N - 1, self.N)
        if self.tie and STEM in made and head in made:
            self.tie(made[STEM], made[head])
        return made

    def parts(self, names: Sequence[str], seed: int, dtype: torch.dtype) -> dict[str, nn.Module]:
        """The parts of some names."""
        return named(self.build_all([edge_of(name) for name in names], seed, dtype))

    @property
    def stem_trains(self) -> bool:
        """Whether the stem has weights to train; nothing is allocated."""
        with torch.device("meta"):
            return any(p.requires_grad for p in self.build(STEM, 0).parameters())

    def count_parameters(self, name: str) -> int:
        """Numbers in a part; nothing is allocated."""
        with torch.device("meta"):
            return count_parameters(self.build(edge_of(name), 0))


class TreeNetwork(nn.Module):
    """All blocks of a tree in one module, keyed by edge."""

    def __init__(
        self, tree: Tree, stem: nn.Module, blocks: dict[Edge, nn.Module], family: str
    ) -> None:
        super().__init__()
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
        return cls(tree, parts.pop(STEM), parts, blueprint.family)

    @classmethod
    def from_blocks(
        cls,
        stem: nn.Module | None,
        blocks: Sequence[nn.Module] | nn.Sequential,
        head: nn.Module,
        *,
        example: Tensor,
        split: str = "floor",
        family: str = "gaussian",
        auxiliary: Callable[[int, int], nn.Module] | None = None,
        seed: int = 1,
    ) -> TreeNetwork:
        """A tree over your own blocks.

        `example` is one small input batch; it is sent through once to check every shape.
        `auxiliary(l, r)` makes the block of a longer edge z_l -> z_r; by default a freshly
        initialised copy of one of the blocks with that input and output shape.
        """
        chain = list(blocks)
        if not chain:
            raise UserError("blocks=[]: at least one block before the head")
        tree = Tree(len(chain) + 1, split)
        stem = stem if stem is not None else nn.Identity()
        states = probe_shapes(stem, chain, head, example)
        made: dict[Edge, nn.Module] = {(i, i + 1): block for i, block in enumerate(chain)}
        made[tree.head] = head
        for edge in tree.blocks:
            if edge in made:
                continue
            with seeded(seed, "init", edge_name(edge)):
                made[edge] = (
                    auxiliary(*edge) if auxiliary else default_auxiliary(chain, states, edge)
                )
            check_shape(
                made[edge], f"auxiliary block {edge_name(edge)}", states[edge[0]], states[edge[1]]
            )
        return cls(tree, stem, made, family)

    def block(self, edge: Edge) -> nn.Module:
        """The block that serves an edge (the head for every edge that ends at N)."""
        return self.stem if edge == STEM else self.edges[edge_name(self.tree.block_of(edge))]

    def parts(self) -> dict[Edge, nn.Module]:
        """Every distinct part with its edge: stem, blocks, head."""
        return {STEM: self.stem, **{edge: self.block(edge) for edge in self.tree.blocks}}

    def path(self, indices: Sequence[int]) -> nn.Sequential:
        """The plain network along a path such as [0, 4, 6, 7, 8]; shares weights with the tree."""
        parts = [("stem", self.stem)]
        parts += [(edge_name(e), self.block(e)) for e in self.tree.path_edges(indices)]
        return nn.Sequential(OrderedDict(parts))

    def chain(self) -> nn.Sequential:
        """The deployed network: stem, blocks 1..N-1, head."""
        return self.path(self.tree.chain)

    def forward(self, x: Tensor) -> Tensor:
        """The deployed chain."""
        out: Tensor = self.chain()(x)
        return out


def count_parameters(module: nn.Module) -> int:
    """Distinct trainable numbers in a module."""
    return sum(p.numel() for p in module.parameters())


def _meta_run(module: nn.Module, what: str, z: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            out = module(z)
    except Exception as e:
        reason = str(e).split("\n")[0]
        raise UserError(
            f"{what}: does not take an input of shape {tuple(z.shape)}: {reason}"
        ) from e
    if not isinstance(out, Tensor):
        raise UserError(f"{what}: must return one tensor, not {type(out).__name__}")
    return out


def probe_shapes(
    stem: nn.Module, chain: Sequence[nn.Module], head: nn.Module, example: Tensor
) -> list[Tensor]:
    """The states z_0 … z_{N-1} of one example batch; a misfit names the block."""
    modes = [(m, m.training) for m in (stem, *chain, head)]
    for m, _ in modes:
        m.eval()
    states = [_meta_run(stem, "stem", example)]
    for i, block in enumerate(chain):
        states.append(_meta_run(block, f"block {i + 1}", states[-1]))
    _meta_run(head, "head", states[-1])
    for m, mode in modes:
        m.train(mode)
    return states


def check_shape(module: nn.Module, what: str, z_in: Tensor, z_out: Tensor) -> None:
    """Raise UserError unless `module` maps a state like z_in to one shaped like z_out."""
    mode = module.training
    got = _meta_run(module.eval(), what, z_in)
    module.train(mode)
    if got.shape != z_out.shape:
        raise UserError(f"{what}: gives shape {tuple(got.shape)}, must give {tuple(z_out.shape)}")


def default_auxiliary(
    chain: Sequence[nn.Module], states: Sequence[Tensor], edge: Edge
) -> nn.Module:
    """A fresh copy of a chain block that maps z_l's shape to z_r's, the nearest one first."""
    l, r = edge
    fits = [
        i for i in range(len(chain))
        if states[i].shape == states[l].shape and states[i + 1].shape == states[r].shape
    ]  # fmt: skip
    if not fits:
        raise UserError(
            f"auxiliary block {edge_name(edge)}: no block maps shape {tuple(states[l].shape)} to "
            f"{tuple(states[r].shape)}; pass auxiliary=lambda l, r: … that makes one"
        )
    nearest = min(fits, key=lambda i: abs(i - l))
    return fresh_copy(chain[nearest])


def fresh_copy(block: nn.Module) -> nn.Module:
    """A deep copy with newly drawn weights (every submodule's own `reset_parameters`)."""
    made = copy.deepcopy(block)
    for module in made.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return made
