"""Settings of TreeProp through time, `time.depth` and so on. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray.config.fields import opt
from treeprop_ray.errors import UserError


@dataclass
class Time:
    """TreeProp through time (gru, elman, a cell of one's own): N = 2**depth symbols per sample."""

    depth: int = opt(
        4, "depth D of the time tree; a sample is cut into 2**D symbols", low=1, high=16
    )
    sweeps: int = opt(0, "consistency sweeps K of the deployed cell", low=0, high=1024)
    lambda_cons: float = opt(1.0, "weight of the consistency loss", low=0)
    recipe: str = opt(
        "paper",
        "paper: one learning rate, one gradient norm; boost: 3 lr for the deployed cell, and each "
        "cell's gradient clipped on its own; lookahead: that, and the deployed cell learns on its "
        "own states in place of the tree's, by the label that the coarser cells lead them to; "
        "newton: each gradient clipped, and the deployed cell learns on its own states, by its own "
        "label: `sweeps` Newton steps over all positions find them, from the tree's states, and "
        "bring the gradient back",
        choices=["paper", "boost", "lookahead", "newton"],
    )
    damping: float = opt(
        0.0,
        "recipe=newton: how much smaller the Jacobians' diagonals are taken; 1: plain sweeps",
        low=0,
        high=1,
        later=True,
    )
    loss: str = opt(
        "mean",
        "squared distances of a depth's nodes, and of the sweeps' positions: their mean or sum (of "
        "a sample)",
        choices=["mean", "sum"],
        later=True,
    )
    gradient: str = opt(
        "both",
        "gradient of a node through both applications of its cell, or through the one that "
        "predicts its right end",
        choices=["both", "one"],
        later=True,
    )
    shards: int = opt(
        1,
        "engine=ray: actors that share the nodes of a wide depth; a power of 2",
        low=1,
        high=1024,
        resumable=True,
    )

    def check(self) -> None:
        """Shards of equal size, none shorter than what sweeps look back on; what recipes lack."""
        shards, nodes = self.shards, 2 ** (self.depth - 1)
        if shards & (shards - 1) or shards > nodes:
            raise UserError(
                f"time.shards={shards}: a power of 2, at most {nodes} "
                "(the nodes of the finest depth)"
            )
        if shards > 1 and self.recipe in ("lookahead", "newton"):
            raise UserError(
                f"time.shards={shards}: time.recipe={self.recipe} has one actor per depth; use 1"
            )
        if self.damping and self.recipe != "newton":
            raise UserError(
                f"time.damping={self.damping}: is for time.recipe=newton, not {self.recipe}; use 0"
            )
        if self.sweeps and self.recipe == "lookahead":
            raise UserError(
                f"time.sweeps={self.sweeps}: time.recipe=lookahead has none, the deployed cell "
                "goes over its own states; use 0"
            )
        for key, default in (("loss", "mean"), ("gradient", "both")):
            value = getattr(self, key)
            if value != default and self.recipe == "lookahead":
                raise UserError(
                    f"time.{key}={value}: is a reading of the paper; time.recipe=lookahead has "
                    f"{default}"
                )
        if self.recipe == "newton" and self.lambda_cons != 1:
            raise UserError(
                f"time.lambda_cons={self.lambda_cons}: time.recipe=newton has no consistency loss; "
                "use 1"
            )
        if shards > 1 and self.sweeps // 2 > nodes // shards:
            raise UserError(
                f"time.shards={shards}: a window of {nodes // shards} nodes is shorter than what "
                f"time.sweeps={self.sweeps} looks back on; use fewer"
            )
