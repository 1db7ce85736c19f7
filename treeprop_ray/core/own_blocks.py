"""The user's own modules as blocks of a tree: do they fit together, and what auxiliary ones are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core.fresh import fresh_copy
from treeprop_ray.core.states import ExitHead, next_state, split_stem
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.errors import UserError, first_line, place_of


def check_modules(parts: Mapping[str, Any], example: Any) -> None:
    """Raise UserError where a part is no module, or the example no batch."""
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            kind = getattr(part, "__name__", type(part).__name__)
            raise UserError(f"{name}: must be a torch.nn.Module, not {kind}")
    inputs = tensors_of(example)
    if not inputs or not all(isinstance(t, Tensor) and t.dim() for t in inputs):
        kind = type(example).__name__
        raise UserError(
            f"example: must be a small batch of inputs, a tensor, not {kind}; of several inputs a "
            "dict or tuple of tensors"
        )


def tensors_of(example: Any) -> list[Any]:
    """The tensors of an example batch."""
    if isinstance(example, Mapping):
        return list(example.values())
    return list(example) if isinstance(example, tuple) else [example]


def shape_text(given: Any) -> str:
    """The shape of a state, or of each of several inputs."""
    if isinstance(given, Mapping):
        return ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items())
    return ", ".join(str(tuple(t.shape)) for t in tensors_of(given))


def check_unshared(parts: Mapping[str, nn.Module]) -> None:
    """Raise UserError where two parts have a parameter, or running means, in common: every part is
    trained by itself, by whoever owns it. (A head with the stem's weights: `Blueprint.tie`.)"""
    owner: dict[int, str] = {}
    for name, part in parts.items():
        running = (pair for pair in part.named_buffers() if "running_" in pair[0])
        for key, parameter in (*part.named_parameters(), *running):
            other = owner.setdefault(id(parameter), name)
            if other != name:
                alike = [n for n, m in parts.items() if m is part]
                what = (
                    f"{', '.join(alike)}: one module"
                    if len(alike) > 1
                    else (f"{other}, {name}: one tensor, {key},")
                )
                raise UserError(
                    f"{what} in several places; every part has weights of its own: use "
                    "copy.deepcopy(block), or make a block for each"
                )


def check_probabilities(states: Sequence[Tensor]) -> None:
    """Raise UserError where a block gives a state that is none of family=bernoulli."""
    for i, z in enumerate(states[1:], 1):
        if ((z < 0) | (z > 1)).any():
            raise UserError(
                f"block {i}: family=bernoulli has states between 0 and 1, this gives "
                f"{float(z.min()):.3g} … {float(z.max()):.3g}; end it in a sigmoid"
            )


def made_by(auxiliary: Callable[[int, int], nn.Module], edge: Edge) -> nn.Module:
    """What the user's auxiliary(l, r) gives."""
    what = f"auxiliary({edge[0]}, {edge[1]})"
    if isinstance(auxiliary, nn.Module) or not callable(auxiliary):
        raise UserError("auxiliary: must be a function of l and r that makes a block")
    try:
        made = auxiliary(*edge)
    except UserError:
        raise
    except Exception as e:  # the user's own code may raise anything
        raise UserError(f"{what}: {type(e).__name__}: {first_line(e)}{place_of(e)}") from e
    if not isinstance(made, nn.Module):
        raise UserError(f"{what}: must give a torch.nn.Module, not {type(made).__name__}")
    return made


def named_blocks(chain: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The blocks of a chain by what an error calls them."""
    return {f"block {i + 1}": block for i, block in enumerate(chain)}


def _meta_run(module: nn.Module, what: str, z: Any, context: Any = None) -> Any:
    try:
        with torch.no_grad():
            return module(z) if what in ("stem", "head") else next_state(module, z, context)
    except UserError as e:
        raise UserError(f"{what}: {e}") from e
    except Exception as e:
        reason = str(e).split("\n")[0]
        raise UserError(f"{what}: does not take an input of shape {shape_text(z)}: {reason}") from e


def _checked_run(module: nn.Module, what: str, z: Tensor, context: Any = None) -> Tensor:
    out = _meta_run(module, what, z, context)
    if not isinstance(out, Tensor):
        raise UserError(f"{what}: must return one tensor, not {type(out).__name__}")
    return out


def probe_shapes(
    stem: nn.Module, chain: Sequence[nn.Module], head: nn.Module, example: Any
) -> tuple[list[Tensor], Any, bool]:
    """The states z_0 … z_{N-1} of one example batch, the context, and whether all blocks give one
    tensor; a misfit names the block."""
    modes = [(m, m.training) for m in (stem, *chain, head)]
    for m, _ in modes:
        m.eval()
    returned: list[Any] = []
    hooks = [m.register_forward_hook(lambda _m, _in, out: returned.append(out)) for m in chain]
    z_0, context = split_stem(_meta_run(stem, "stem", example))
    states = [z_0]
    for i, block in enumerate(chain):
        states.append(_checked_run(block, f"block {i + 1}", states[-1], context))
    for hook in hooks:
        hook.remove()
    _checked_run(head, "head", states[-1])
    for m, mode in modes:
        m.train(mode)
    check_pair(context, returned[0])
    return states, context, all(isinstance(out, Tensor) for out in returned)


def check_pair(context: Any, out: Any) -> None:
    """Raise UserError where the second tensor of a state (h, c) was taken for the context."""
    if not isinstance(out, tuple) or len(out) != 2:
        return
    kinds = [(t.shape, t.dtype) if isinstance(t, Tensor) else None for t in (context, out[1])]
    if kinds[0] is not None and kinds[0] == kinds[1] and kinds[0][1].is_floating_point:
        raise UserError(
            "block 1: returns two tensors like z_0 and the context, which is one all along the "
            "chain; a state of two tensors is what a stem returns as ((a, b), None) or as a dict"
        )


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
