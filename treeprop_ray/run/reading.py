"""Reading a finished or unfinished run: its checkpoint, and the network it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from treeprop_ray import methods
from treeprop_ray.config import Settings, is_remote
from treeprop_ray.core.network import Shape, TreeNetwork
from treeprop_ray.data import DataSet, load
from treeprop_ray.errors import UserError
from treeprop_ray.models.rnn import TimeNetwork
from treeprop_ray.run import checkpoint
from treeprop_ray.run.folder import check_permutation, checkpoints_of, run_settings
from treeprop_ray.run.identity import Identity
from treeprop_ray.run.storage import Storage


def stored_at(run: str, settings: Settings, given: str = "") -> Storage:
    """Where the checkpoints of a run lie. An address that only its config.yaml names is not
    opened: the file may be of somebody else, and credentials are not in it."""
    if not given and is_remote(settings.storage):
        where = settings.storage
        raise UserError(
            f"run={run}: its checkpoints are at {where}, which a file says; "
            f"storage={where} opens it (with the credentials it needs)"
        )
    return checkpoints_of(replace(settings, storage=given or settings.storage), Path(run))


def pick_checkpoint(run: str, which: str, given: str = "") -> checkpoint.Checkpoint:
    """The newest checkpoint, the best one, or a given step; `given` is the user's storage=."""
    settings = run_settings(run)
    storage = stored_at(run, settings, given)
    found = checkpoint.newest(storage)
    if found is None:
        raise UserError(f"run={run}: has no checkpoint")
    Identity.of(settings, Path(run)).check(found)
    if which == "last":
        return found
    if which == "best":
        step = found.meta["best"]["step"]
    elif checkpoint.is_step(which):
        step = int(which)
    else:
        raise UserError(f"checkpoint={which}: last, best or a step number")
    try:
        return checkpoint.load(storage, step)
    except checkpoint.DamagedCheckpoint as e:
        have = ", ".join(map(str, checkpoint.steps(storage)))
        raise UserError(f"checkpoint={which}: {e}; steps kept: {have}") from e


def load_network(
    settings: Settings, shape: Shape, point: checkpoint.Checkpoint
) -> TreeNetwork | TimeNetwork:
    """The network of a run with the weights of a checkpoint (a BP run has no auxiliary ones)."""
    method = methods.of(settings)
    checkpoint.check_fits(point, method.tree(settings).N, settings.split)
    network = method.assemble(settings, shape, point.weights)
    network.eval()
    return network


def open_run(
    run: str, which: str, data_root: str | None, storage: str = ""
) -> tuple[Settings, DataSet, checkpoint.Checkpoint, TreeNetwork | TimeNetwork]:
    """Settings, data, checkpoint and network of a run; `data_root` if its data has moved."""
    settings = run_settings(run)
    settings.data.root = data_root or settings.data.root
    found = pick_checkpoint(run, which, storage)
    samples = load(settings)
    check_permutation(run, samples.permutation)
    return settings, samples, found, load_network(settings, samples.shape, found)
