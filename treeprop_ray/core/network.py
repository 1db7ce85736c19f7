"""TreeNetwork: blocks on the edges of a tree, built from a list of blocks; paths and the chain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core.fresh import fresh_copy
from treeprop_ray.core.rng import seeded
from treeprop_ray.core.states import ExitHead, Path, Spec, next_state, spec_of, split_stem
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
    return {key[len(prefix) :]: state[key] for key in state if key.startswith(prefix)}


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
    context: Any = None  # what the stem gives besides z_0, anything in place of its tensors

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


class TreeNetwork(nn.Module):
    """All blocks of a tree in one module, keyed by edge."""

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
        return cls(tree, parts.pop(STEM), parts, blueprint.family, blueprint.spec)

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
        exits: Mapping[int, nn.Module] | Callable[[int], nn.Module | None] | None = None,
        seed: int = 1,
    ) -> TreeNetwork:
        """A tree over your own blocks.

        `example` is one small input batch; it is sent through once to check every shape.
        `auxiliary(l, r)` makes the block of a longer edge z_l -> z_r; by default a freshly
        initialised copy of one of the blocks with that input and output shape. A stem may return
        (z_0, context) with what all blocks need besides their state (core/states.py); a block that
        returns a tuple gives its state first. Where the shapes of states differ along the chain,
        `exits` brings a state that ends a short path into the form the head takes: a module for
        its index, {2: pool}, or a function of the index.
        """
        chain = list(blocks)
        if not chain:
            raise UserError("blocks=[]: at least one block before the head")
        stem = stem if stem is not None else nn.Identity()
        check_unshared({"stem": stem, **named_blocks(chain), "head": head})
        tree = Tree(len(chain) + 1, split)
        states, context, plain = probe_shapes(stem, chain, head, example)
        made: dict[Edge, nn.Module] = {(i, i + 1): block for i, block in enumerate(chain)}
        made[tree.head] = with_exits(head, exits, tree, states) if exits else head
        for edge in tree.blocks:
            if edge in made:
                continue
            with seeded(seed, "init", edge_name(edge)):
                made[edge] = (
                    auxiliary(*edge) if auxiliary else default_auxiliary(chain, states, edge)
                )
            check_shape(
                made[edge],
                f"auxiliary block {edge_name(edge)}",
                states[edge[0]],
                states[edge[1]],
                context,
            )
        check_unshared(named({STEM: stem, **made}))
        check_exits(made[tree.head], tree, states)
        spec = None if context is None else spec_of(context)
        return cls(tree, stem, made, family, spec, plain)

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
        return (nn.Sequential if self.plain else Path)(OrderedDict(parts))

    def chain(self) -> nn.Sequential:
        """The deployed network: stem, blocks 1..N-1, head."""
        return self.path(self.tree.chain)

    def forward(self, x: Tensor) -> Tensor:
        """The deployed chain."""
        out: Tensor = self.chain()(x)
        return out


def named_blocks(chain: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The blocks of a chain by what an error calls them."""
    return {f"block {i + 1}": block for i, block in enumerate(chain)}


def check_unshared(parts: Mapping[str, nn.Module]) -> None:
    """Raise UserError where two parts have a parameter in common: every part is trained by itself,
    by whoever owns it. (A head that uses the stem's weights: `Blueprint.tie`.)"""
    owner: dict[int, str] = {}
    for name, part in parts.items():
        for key, parameter in part.named_parameters():
            other = owner.setdefault(id(parameter), name)
            if other != name:
                alike = [n for n, m in parts.items() if m is part]
                what = (
                    f"{', '.join(alike)}: one module"
                    if len(alike) > 1
                    else (f"{other}, {name}: one parameter, {key},")
                )
                raise UserError(
                    f"{what} in several places; every part has weights of its own: use "
                    "copy.deepcopy(block), or make a block for each"
                )


def count_parameters(module: nn.Module) -> int:
    """Distinct trainable numbers in a module."""
    return sum(p.numel() for p in module.parameters())


def _meta_run(module: nn.Module, what: str, z: Tensor, context: Any = None) -> Any:
    try:
        with torch.no_grad():
            return module(z) if what == "stem" else next_state(module, z, context)
    except Exception as e:
        reason = str(e).split("\n")[0]
        raise UserError(
            f"{what}: does not take an input of shape {tuple(z.shape)}: {reason}"
        ) from e


def _checked_run(module: nn.Module, what: str, z: Tensor, context: Any = None) -> Tensor:
    out = _meta_run(module, what, z, context)
    if not isinstance(out, Tensor):
        raise UserError(f"{what}: must return one tensor, not {type(out).__name__}")
    return out


def probe_shapes(
    stem: nn.Module, chain: Sequence[nn.Module], head: nn.Module, example: Tensor
) -> tuple[list[Tensor], Any, bool]:
    """The states z_0 … z_{N-1} of one example batch, the context, and whether all blocks give one
    tensor; a misfit names the block."""
    modes = [(m, m.training) for m in (stem, *chain, head)]
    for m, _ in modes:
        m.eval()
    returned: list[bool] = []
    hooks = [
        m.register_forward_hook(lambda _m, _in, out: returned.append(isinstance(out, Tensor)))
        for m in chain
    ]
    z_0, context = split_stem(_meta_run(stem, "stem", example))
    states = [z_0]
    for i, block in enumerate(chain):
        states.append(_checked_run(block, f"block {i + 1}", states[-1], context))
    for hook in hooks:
        hook.remove()
    _checked_run(head, "head", states[-1])
    for m, mode in modes:
        m.train(mode)
    return states, context, all(returned)


def with_exits(
    head: nn.Module,
    exits: Mapping[int, nn.Module] | Callable[[int], nn.Module | None],
    tree: Tree,
    states: Sequence[Tensor],
) -> nn.Module:
    """The head with what brings each spine state into its form."""
    spine = [node.n for node in tree.spine]
    given = {n: exits(n) for n in spine} if callable(exits) else dict(exits)
    chosen: dict[tuple[int, ...], nn.Module] = {}
    for n, module in given.items():
        if n not in spine:
            raise UserError(
                f"exits={n}: no short path ends at z_{n}; those that do: "
                f"{', '.join(map(str, spine))}"
            )
        shape = tuple(states[n].shape[1:])
        if module is not None and chosen.setdefault(shape, module) is not module:
            raise UserError(
                f"exits={n}: z_{n} has the shape {shape} of another exit, and an exit is chosen by "
                "the state's shape; give one module for both"
            )
    return ExitHead(head, chosen)


def check_exits(head: nn.Module, tree: Tree, states: Sequence[Tensor]) -> None:
    """Raise UserError unless the head takes the state of every spine node."""
    mode = head.training
    head.eval()
    for node in tree.spine:
        if states[node.n].shape != states[-1].shape:
            try:
                with torch.no_grad():
                    head(states[node.n])
            except Exception as e:
                raise UserError(
                    f"head: takes z_{tree.N - 1} of shape {tuple(states[-1].shape)}, but not "
                    f"z_{node.n} of shape {tuple(states[node.n].shape)}, which ends a short path; "
                    f"give exits={{{node.n}: module}} that brings it into that form"
                ) from e
    head.train(mode)


def check_shape(
    module: nn.Module, what: str, z_in: Tensor, z_out: Tensor, context: Any = None
) -> None:
    """Raise UserError unless `module` maps a state like z_in to one shaped like z_out."""
    mode = module.training
    got = _checked_run(module.eval(), what, z_in, context)
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
    return fresh_copy(chain[nearest], f"auxiliary block {edge_name(edge)}")
