"""Settings of the tree and its objective; most of their keys have no prefix. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray.config.fields import group, opt
from treeprop_ray.config.nested import Weights
from treeprop_ray.errors import UserError


@dataclass
class Objective:
    """The tree and its objective."""

    split: str = opt("floor", "where an interval is cut", choices=["floor", "right_full"])
    family: str = opt(
        "auto",
        "distribution of the states; auto: bernoulli for sigmoid networks",
        choices=["auto", "gaussian", "bernoulli"],
    )
    objective: str = opt(
        "node",
        "final_ce: CE at the finest spine node; node: own + right + that; "
        "node_all_ce: own + right + CE at every spine node",
        choices=["final_ce", "node", "node_all_ce"],
    )
    alpha: float = opt(1.0, "share of the forward estimate in the posterior mean", low=0, high=1)
    beta: float = opt(0.0, "share of the right-boundary correction", low=0, high=1)
    correction: str = opt(
        "mean",
        "mean: gradient of the mean-reduced right loss; vjp: the literal per-sample product (leaks "
        "labels); normalised: as long, for each sample, as correction_scale times the forward "
        "estimate; clipped: vjp, for each sample at most that long",
        choices=["mean", "vjp", "normalised", "clipped"],
    )
    correction_scale: float = opt(
        1.0,
        "factor on the correction; normalised, clipped: norm of the correction over that of the "
        "forward estimate",
        low=0,
    )
    input: str = opt(
        "mean",
        "what the right blocks read for their loss: the forward estimate, or the sample z_n (the "
        "formula)",
        choices=["mean", "sample"],
        later=True,
    )
    ce_at: str = opt(
        "mean",
        "where the cross-entropy is taken: at the forward estimate, or at the sample z_n (the "
        "formula)",
        choices=["mean", "sample"],
        later=True,
    )
    reduction: str = opt(
        "mean",
        "own and right: means over elements; or summed over the elements of a label and, gaussian, "
        "over 2 sigma_p^2 with sigma_p^2 = 2 sigma^2, which are nats (the formula)",
        choices=["mean", "sigma"],
        later=True,
    )
    bernoulli: str = opt(
        "kl",
        "bernoulli states; kl: the KL, alpha + beta = 1, the right side read as an estimate of the "
        "state; literal: binary cross-entropy, alpha and beta free, the formula of the mean as it "
        "stands",
        choices=["kl", "literal"],
        later=True,
    )
    levels: str = opt(
        "all",
        "own and right at every level; or only where the block is one of the chain: the N - 1 "
        "terms of the bound (coarser right blocks then learn nothing)",
        choices=["all", "finest"],
        later=True,
    )
    sigma: float = opt(0.0, "noise of the posterior samples (gaussian)", low=0)
    noise_schedule: str = opt(
        "depth", "depth: sigma * sqrt(2^(D-s)) at level s; flat: sigma", choices=["depth", "flat"]
    )
    mc_samples: int = opt(
        1, "Monte Carlo samples of the objective per training sample", low=1, high=4096
    )
    target_gradient: bool = opt(True, "differentiate both sides of the KLs")
    detach_levels: bool = opt(False, "cut all gradients between levels")
    weights: Weights = group(Weights)

    def check(self) -> None:
        """A posterior mean needs something to be the mean of."""
        if self.alpha == 0 and self.beta == 0:
            raise UserError(
                "alpha=0 beta=0: the posterior mean would be zero; one must be positive"
            )
