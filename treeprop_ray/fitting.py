"""Train your own blocks from Python: `fit(network, x, y, epochs=20)`."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from treeprop_ray import config
from treeprop_ray.config import Settings
from treeprop_ray.data import Batches, DataSet, Split
from treeprop_ray.engine.local import LocalEngine, pick_device
from treeprop_ray.errors import UserError
from treeprop_ray.network import TreeNetwork
from treeprop_ray.optim import OptimizerRule
from treeprop_ray.progress import Bar
from treeprop_ray.rule import Rule


def fit(network: TreeNetwork, x: Tensor, y: Tensor, **settings: Any) -> TreeNetwork:
    """Train `network` in place on inputs x (n, …) and integer labels y (n, …); returns it.

    Keywords are the settings of the train command (`epochs=20, lr=3e-4, alpha=1.0, beta=0.5,
    sigma=0.005, objective="node_all_ce", …`); nested ones as `weights={"right": 0.5}`. With
    `epochs` = k every sample is seen k times, in batches of `batch`.
    """
    chosen = read_settings(network, settings)
    if len(x) != len(y):
        raise UserError(f"x has {len(x)} samples, y has {len(y)} labels; must be the same number")
    split = Split(x, y)
    data = DataSet("own", split, split, split, int(y.max()) + 1, lambda x: x, x.dtype)
    batches = Batches(data, chosen.batch, chosen.seed)
    steps = chosen.steps or chosen.epochs * batches.per_epoch
    torch.set_num_threads(chosen.threads)
    engine = LocalEngine(
        network,
        Rule.of(chosen, network.family, data.labels_per_sample),
        OptimizerRule.of(chosen, steps),
        batches,
        chosen.microbatches,
        pick_device(chosen.device),
        chosen.precision,
    )
    with Bar("fit", steps) as bar:
        for step in range(steps):
            engine.step(step, report=False)
            bar.advance()
            if (step + 1) % batches.per_epoch == 0:
                ce = engine.reports()[0].losses[network.tree.spine[-1].n]["ce"]
                epoch = (step + 1) // batches.per_epoch
                bar.line(f"epoch {epoch}/{chosen.epochs}  cross-entropy {ce:.4f}")
    return network.cpu()


def read_settings(network: TreeNetwork, given: dict[str, Any]) -> Settings:
    """Keywords to checked settings; the network decides the family."""
    if network.family == "gaussian":
        given = {"model": {"activation": "gelu"}, **given}  # no claim about the user's blocks
    settings: Settings = config.merge(
        Settings, ("", OmegaConf.create({"family": network.family, **given}))
    )
    return settings
