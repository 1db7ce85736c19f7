"""Paths of a trained tree: named by the user, run and scored in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.core.scoring import Counts, Score, Through, count, path_states
from treeprop_ray.core.tree import Edge
from treeprop_ray.errors import UserError
from treeprop_ray.methods import Method
from treeprop_ray.methods.outline import Outline
from treeprop_ray.models.rnn import TimeNetwork

Network = TreeNetwork | TimeNetwork


def as_path_text(value: object) -> str:
    """What the user gave for a path, as text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)


def parse_path(text: str, outline: Outline, method: Method) -> list[int]:
    """A path by name (full, spine-2) or as indices such as [0,4,6,8]; checked against the tree."""
    tree = outline.tree
    named = {**tree.named_paths, **outline.paths} if method.short_paths else outline.paths
    if text in named:
        return named[text]
    try:
        path = [int(word) for word in text.strip("[]() ").replace("-", ",").split(",")]
        tree.path_edges(path)
    except ValueError as e:
        reason = str(e) if str(e).startswith("path=") else f"path={text}: not a list of indices"
        raise UserError(f"{reason}; names: {', '.join(named)}") from e
    if not method.short_paths and path != tree.chain:
        kind = f"method={method.name}"
        raise UserError(f"path={text}: a run with {kind} has trained only the full chain")
    return path


def autocast(network: TreeNetwork, z: Tensor) -> torch.autocast:
    """The precision that the network was trained in."""
    half = network.cast
    return torch.autocast(z.device.type, half or torch.bfloat16, enabled=half is not None)


def network_through(network: TreeNetwork) -> Through:
    """Runs the blocks of a network in this process, in evaluation mode."""
    parts = network.eval().parts()

    @torch.no_grad()
    def through(edge: Edge, z: Tensor) -> Tensor:
        with autocast(network, z):
            out: Tensor = parts[edge](z)
        return out

    return through


def score_network(
    network: Network,
    paths: Mapping[str, Sequence[int]],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> dict[str, Score]:
    """Score paths of a network in this process."""
    if not isinstance(network, TreeNetwork):
        return network.eval().score(paths, batches)
    through, head = network_through(network), network.block(network.tree.head)
    counts: dict[str, list[Counts]] = {name: [] for name in paths}
    for x, y in batches:
        for name, z in path_states(network.tree, paths, x, through).items():
            with autocast(network, z):
                counts[name].append(count(head, z, y))
    return {name: Score.of(of_path) for name, of_path in counts.items()}
