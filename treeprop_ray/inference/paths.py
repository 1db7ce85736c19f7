"""Paths of a trained tree: named by the user, run and scored in this process, shown as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.core.tree import Edge
from treeprop_ray.engine.base import Score, Through, count, score_paths
from treeprop_ray.errors import UserError
from treeprop_ray.methods.outline import Outline
from treeprop_ray.models.rnn import TimeNetwork

Network = TreeNetwork | TimeNetwork


def as_path_text(value: object) -> str:
    """What the user gave for a path, as text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)


def parse_path(text: str, outline: Outline, method: str) -> list[int]:
    """A path by name (full, spine-2) or as indices such as [0,4,6,8]; checked against the tree."""
    tree = outline.tree
    named = {**tree.named_paths, **outline.paths} if method == "tree" else outline.paths
    if text in named:
        return named[text]
    try:
        path = [int(word) for word in text.strip("[]() ").replace("-", ",").split(",")]
        tree.path_edges(path)
    except ValueError as e:
        reason = str(e) if str(e).startswith("path=") else f"path={text}: not a list of indices"
        raise UserError(f"{reason}; names: {', '.join(named)}") from e
    if method != "tree" and path != tree.chain:
        raise UserError(f"path={text}: a run with method={method} has trained only the full chain")
    return path


def network_through(network: TreeNetwork) -> Through:
    """Runs the blocks of a network in this process, in evaluation mode."""
    parts = network.eval().parts()

    @torch.no_grad()
    def through(edge: Edge, z: Tensor) -> Tensor:
        with torch.autocast(z.device.type, torch.bfloat16, enabled=network.bf16):
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
    through = network_through(network)

    def score(z: Tensor, y: Tensor) -> tuple[float, int, int]:
        with torch.autocast(z.device.type, torch.bfloat16, enabled=network.bf16):
            return count(network.block(network.tree.head), z, y)

    return score_paths(network.tree, paths, batches, through, score)
