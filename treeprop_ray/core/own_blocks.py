"""The user's own modules as blocks of a tree: do they fit together, and what auxiliary ones are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core.fresh import fresh_copy
from treeprop_ray.core.states import ExitHead, next_state, split_stem
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError


def named_blocks(chain: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The blocks of a chain by what an error calls them."""
    return {f"block {i + 1}": block for i, block in enumerate(chain)}


def _meta_run(module: nn.Module, what: str, z: Tensor, context: Any = None) -> Any:
    try:
        with torch.no_grad():
            return module(z) if what in ("stem", "head") else next_state(module, z, context)
    except UserError as e:
        raise UserError(f"{what}: {e}") from e
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
    what = f"auxiliary block {l}-{r}"
    fits = [
        i for i in range(len(chain))
        if states[i].shape == states[l].shape and states[i + 1].shape == states[r].shape
    ]  # fmt: skip
    if not fits:
        raise UserError(
            f"{what}: no block maps shape {tuple(states[l].shape)} to "
            f"{tuple(states[r].shape)}; pass auxiliary=lambda l, r: … that makes one"
        )
    nearest = min(fits, key=lambda i: abs(i - l))
    return fresh_copy(chain[nearest], what)
