"""Reading a finished or unfinished run: settings, checkpoint, and the network it holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treeprop_ray import config
from treeprop_ray.config import Settings
from treeprop_ray.errors import UserError
from treeprop_ray.run import checkpoint
from treeprop_ray.run.folder import checkpoints_of

if TYPE_CHECKING:
    from torch import Tensor

    from treeprop_ray.core.network import TreeNetwork
    from treeprop_ray.data import DataSet, Shape
    from treeprop_ray.methods.outline import Outline
    from treeprop_ray.models.rnn import TimeNetwork


def run_settings(run: str) -> Settings:
    """The settings of a run folder."""
    if not run:
        raise UserError("run= : give a run folder, e.g. run=results/runs/<name>")
    path = Path(run)
    if not path.is_dir():
        raise UserError(f"run={run}: no such folder")
    if not (path / "config.yaml").is_file():
        raise UserError(f"run={run}: holds no config.yaml, so it is no run folder")
    return config.load_file(path / "config.yaml")


def pick_checkpoint(run: str, which: str) -> checkpoint.Checkpoint:
    """The newest checkpoint, the best one, or a given step."""
    storage = checkpoints_of(run_settings(run), Path(run))
    found = checkpoint.newest(storage)
    if found is None:
        raise UserError(f"run={run}: has no checkpoint")
    if which == "last":
        return found
    if which == "best":
        step = found.meta["best"]["step"]
    elif which.isdigit():
        step = int(which)
    else:
        raise UserError(f"checkpoint={which}: last, best or a step number")
    try:
        return checkpoint.load(storage, step)
    except checkpoint.DamagedCheckpoint as e:
        have = ", ".join(map(str, checkpoint.steps(storage)))
        raise UserError(f"checkpoint={which}: {e}; steps kept: {have}") from e


def check_permutation(run: str, permutation: Tensor | None) -> None:
    """The order in which a run has read its numbers is the one that this program would use."""
    stored = Path(run) / "permutation.json"
    if permutation is None or not stored.is_file():
        return
    if json.loads(stored.read_text()) != permutation.tolist():
        raise UserError(f"{stored}: is not the permutation that data.permuted=true gives here")


def load_network(
    settings: Settings, data: DataSet | Shape, found: checkpoint.Checkpoint
) -> TreeNetwork | TimeNetwork:
    """The network of a run with the weights of a checkpoint (a BP run has no auxiliary ones)."""
    if config.recurrent(settings):
        from treeprop_ray.models.rnn import TimeNetwork

        checkpoint.check_fits(found, 2**settings.time.depth, settings.split)
        return TimeNetwork.of(settings, data, found.weights).eval()
    from treeprop_ray.core.network import TreeNetwork, edge_name
    from treeprop_ray.core.tree import Tree
    from treeprop_ray.models import blueprint

    plan = blueprint(settings, data)
    tree = Tree(plan.N, settings.split)
    checkpoint.check_fits(found, tree.N, settings.split)
    network = TreeNetwork.from_blueprint(plan, tree, settings.seed, data.dtype)
    for edge, module in network.parts().items():
        prefix = edge_name(edge) + "/"
        mine = {k[len(prefix) :]: v for k, v in found.weights.items() if k.startswith(prefix)}
        if mine:
            module.load_state_dict(mine)
    network.bf16 = settings.precision == "bf16"
    return network.eval()


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


def as_path_text(value: object) -> str:
    """What the user gave for a path, as text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)


def open_run(
    run: str, which: str, data_root: str | None
) -> tuple[Settings, DataSet, checkpoint.Checkpoint, TreeNetwork | TimeNetwork]:
    """Settings, data, checkpoint and network of a run; `data_root` if its data has moved."""
    from treeprop_ray import data

    settings = run_settings(run)
    settings.data.root = data_root or settings.data.root
    found = pick_checkpoint(run, which)
    samples = data.load(settings)
    check_permutation(run, samples.permutation)
    return settings, samples, found, load_network(settings, samples, found)
