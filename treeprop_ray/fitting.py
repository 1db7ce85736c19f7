"""Train your own blocks from Python: `fit(network, x, y, epochs=20)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from treeprop_ray import config
from treeprop_ray.config import Settings
from treeprop_ray.core.network import TreeNetwork, edge_name
from treeprop_ray.core.optim import OptimizerRule
from treeprop_ray.core.rule import Rule
from treeprop_ray.data import Batches, DataSet, Split
from treeprop_ray.engine import local
from treeprop_ray.engine.base import Engine, StepReport
from treeprop_ray.errors import UserError
from treeprop_ray.run.progress import Bar


def fit(network: TreeNetwork, x: Tensor, y: Tensor, **settings: Any) -> TreeNetwork:
    """Train `network` in place on inputs x (n, …) and integer labels y (n, …); returns it.

    Keywords are the settings of the train command (`epochs=20, lr=3e-4, alpha=1.0, beta=0.5,
    sigma=0.005, objective="node_all_ce", …`); nested ones as `weights={"right": 0.5}`. An epoch
    goes once through the samples in a new order, less an incomplete last batch.
    """
    chosen = read_settings(network, settings)
    if len(x) != len(y):
        raise UserError(f"x has {len(x)} samples, y has {len(y)} labels; must be the same number")
    split = Split(x, y)
    data = DataSet("own", split, split, split, int(y.max()) + 1, torch.Tensor.clone, x.dtype)
    batches = Batches(data, chosen.batch, chosen.seed)
    steps = chosen.steps or chosen.epochs * batches.per_epoch
    engine = engine_for(network, chosen, batches, steps)
    try:
        with Bar("fit", steps) as bar:
            for step in range(steps):
                ends = (step + 1) % batches.per_epoch == 0
                engine.step(step, report=ends)
                bar.advance()
                if ends:
                    now = brief(engine.reports())
                    bar.line(f"epoch {(step + 1) // batches.per_epoch}  {now}", now)
        weights, _ = engine.state()
    finally:
        engine.close()
    for edge, module in network.cpu().parts().items():
        prefix = edge_name(edge) + "/"
        mine = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        if mine:  # backpropagation has no auxiliary blocks
            module.load_state_dict(mine)
    return network


def engine_for(network: TreeNetwork, settings: Settings, batches: Batches, steps: int) -> Engine:
    """The engine that the settings name, over the modules of `network`."""
    if settings.engine == "train":
        raise UserError("engine=train: belongs to the train command; fit has local and ray")
    if settings.engine == "ray":
        from treeprop_ray.engine import ray
        from treeprop_ray.engine.job import Job

        parts = network.parts()
        job = Job(
            tree=network.tree,
            rule=Rule.of(settings, network.family, batches.data.labels_per_sample),
            optimizer=OptimizerRule.of(settings, steps),
            parts=lambda edges: {edge: parts[edge] for edge in edges},
            batches=lambda: batches,
            stem_trains=any(p.requires_grad for p in network.stem.parameters()),
            batch=settings.batch,
            samples=len(batches.data.train),
            splits=batches.data.batch_counts,
        )
        return ray.launch(job, settings)
    return local.over(network, settings, batches, steps)


def brief(reports: Sequence[StepReport]) -> str:
    """The cross-entropies of the last batch, coarsest prediction first."""
    found = {n: v["ce"] for r in reports for n, v in r.losses.items() if "ce" in v}
    return "cross-entropy " + " ".join(f"{found[n]:.4f}" for n in sorted(found))


def read_settings(network: TreeNetwork, given: dict[str, Any]) -> Settings:
    """Keywords to checked settings; the network decides the family."""
    if network.family == "gaussian":
        given = {"model": {"activation": "gelu"}, **given}  # no claim about the user's blocks
    settings: Settings = config.merge(
        Settings, ("", OmegaConf.create({"family": network.family, **given}))
    )
    return settings
