"""Groups of settings whose keys have no prefix; `Settings` inherits them all. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray.config.fields import group, opt
from treeprop_ray.config.names import dotted
from treeprop_ray.config.nested import RaySettings, Weights
from treeprop_ray.errors import UserError


@dataclass
class Run:
    """The run: what is trained, how, and where it is kept."""

    experiment: str = opt(
        "digits",
        "a file of experiments/, or a path to your own .yaml; a+b lays b over a: mnist_d3+literal "
        "has the paper's formulas to the letter",
        resumable=True,
    )
    name: str = opt(
        "",
        "name of the run folder; default: experiment, method and a hash of settings",
        resumable=True,
    )
    out: str = opt("results/runs", "folder that holds the run folders", resumable=True)
    fresh: bool = opt(False, "start anew even if the run folder holds a run", resumable=True)
    init_from: str = opt(
        "",
        "weights to begin with: a run folder, a checkpoint (…/checkpoints/step-…), an exported "
        "path or a Hugging Face folder; parts are taken by name and shape, when a run starts",
        later=True,
    )
    init_strict: bool = opt(
        True, "every part must be there; false: those that are not start fresh", later=True
    )
    resume_with_changes: bool = opt(
        False,
        "take a run up with another lr, schedule, warmup, weight_decay, momentum, betas, eps, "
        "clip, freeze, epochs or steps; summary.json says from which step on",
        resumable=True,
    )
    seed: int = opt(1, "seed of initialisation, data order and noise", low=0, high=2**31 - 1)
    method: str = opt(
        "tree",
        "TreeProp, plain backpropagation of the chain, or contrastive forward-forward with margin; "
        "through time: tree, bptt (the same cell, unrolled), bptt_fused (torch.nn.GRU) "
        "[tree|bp|cff|bptt|bptt_fused]",
    )

    def check(self) -> None:
        """A run is a folder of `out`."""
        if "/" in self.name or self.name in (".", ".."):
            raise UserError(f"name={self.name}: a plain folder name without '/'")


@dataclass
class Machines:
    """Processes, devices and how they talk to each other."""

    engine: str = opt(
        "local",
        "one process, Ray actors, or (method=bp) Ray Train: data-parallel workers, `hosts` of them",
        choices=["local", "ray", "train"],
        resumable=True,
    )
    placement: str = opt(
        "auto",
        "per_node: an actor per tree node; packed: lines of nodes share actors; auto: whichever "
        "the cost model finds fastest, hosts and (with microbatches) copies too; it says why",
        choices=["auto", "per_node", "packed"],
        resumable=True,
    )
    hosts: int = opt(
        0, "number of actors when packed; 0 = one per device, or auto's", low=0, resumable=True
    )
    head_copies: int = opt(
        0,
        "tree, ray: so many more actors, with copies of the head that answer some levels of the "
        "spine; weights go there and gradients come back at every step",
        low=0,
        later=True,
        resumable=True,
    )
    cpus_per_actor: float = opt(
        0.0, "CPUs each actor asks Ray for; 0 = an equal share", low=0, resumable=True
    )
    gpus_per_actor: float = opt(
        -1.0,
        "GPUs each actor asks Ray for; -1 = an equal share of those there are",
        low=-1,
        resumable=True,
    )
    strategy: str = opt(
        "PACK",
        "how Ray spreads the actors over machines",
        choices=["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        resumable=True,
    )
    transport: str = opt(
        "store",
        "how tensors travel: by the object store and a call of the driver for every wave; stream: "
        "from actor to actor, which run their calls without the driver; auto: stream where the "
        "first steps show short calls",
        choices=["store", "stream", "auto"],
        gone=dict.fromkeys(("gloo", "nccl", "nixl"), "Ray Direct Transport; use stream"),
        resumable=True,
    )
    in_flight: int = opt(2, "steps the driver submits ahead", low=1, high=64, resumable=True)
    snapshot_every: int = opt(
        50, "steps between recovery points in memory (ray)", low=1, resumable=True
    )
    max_failures: int = opt(
        8, "lost actors a run recovers from before it stops (ray)", low=0, resumable=True
    )
    elastic: bool = opt(
        False,
        "use machines that join: at a recovery point, as many copies as fit, the batch cut into "
        "the same replicas * microbatches pieces (ray)",
        resumable=True,
    )
    wave_timeout: float = opt(
        600.0, "seconds after which a late actor is taken for lost and made anew (ray)", above=0,
        resumable=True,
    )  # fmt: skip
    timeline_steps: int = opt(
        3, "last steps drawn in timeline.json and waves.png; 0 = none", low=0, resumable=True
    )
    ray: RaySettings = group(RaySettings)
    device: str = opt(
        "auto",
        "auto takes a GPU when there is one",
        choices=["auto", "cpu", "cuda"],
        resumable=True,
    )
    precision: str = opt(
        "float32",
        "bf16, fp16: autocast of the blocks; fp16 with a loss scale that halves when a gradient "
        "overflows (the step is left out) and doubles after 2000 steps",
        choices=["float32", "bf16", "fp16", "float64"],
    )
    threads: int = opt(1, "torch threads per process", low=1, high=1024, resumable=True)
    microbatches: int = opt(1, "pieces a batch is cut into; gradients add up", low=1)
    replicas: int = opt(
        1,
        "copies of all actors, each with its share of every batch, cut into `microbatches`; the "
        "weights are those of replicas * microbatches micro-batches in one process",
        low=1,
        later=True,
    )
    shard_optimizer: bool = opt(
        False,
        "each copy keeps and updates its share of the optimizer's state; weights travel in place "
        "of gradients",
        resumable=True,
    )
    reduce: str = opt(
        "exact",
        "how copies add up gradients: exact: in the order of one process; fast: by all-reduce of "
        "torch.distributed (nccl, gloo), which is less memory and traffic and another rounding",
        choices=["exact", "fast"],
        later=True,
    )
    recompute: bool = opt(
        False,
        "tree, bp: activation checkpointing; a block keeps its input only and runs again in the "
        "backward",
        resumable=True,
    )
    compile: bool = opt(
        False,
        "tree, bp, cff: torch.compile of every block; another rounding, so not bit for bit what it "
        "is without, nor from machine to machine; falls back with a warning",
        resumable=True,
    )
    compile_backend: str = opt(
        "inductor",
        "what compiles; aot_eager and eager need no compiler (to look for mistakes)",
        choices=["inductor", "aot_eager", "eager"],
        resumable=True,
    )

    def check(self) -> None:
        """A backend is for compiling, and copies must be there to be added up."""
        if self.replicas == 1 and (self.shard_optimizer or self.reduce != "exact"):
            word = "shard_optimizer=true" if self.shard_optimizer else f"reduce={self.reduce}"
            raise UserError(f"{word}: is about copies; needs replicas of at least 2")
        if self.reduce != "exact" and self.engine == "local":
            raise UserError(f"reduce={self.reduce}: one process has one order; use engine=ray")
        if self.compile_backend != "inductor" and not self.compile:
            raise UserError(f"compile_backend={self.compile_backend}: needs compile=true")


@dataclass
class Training:
    """Training: epochs, batches and the optimizer."""

    epochs: int = opt(30, "passes over the training data", low=1, resumable=True)
    steps: int = opt(0, "stop after so many steps; 0 = all epochs", low=0, resumable=True)
    batch: int = opt(64, "batch size", low=1)
    accumulate: int = opt(
        1,
        "batches of an optimizer step: gradients are means over all of them, steps and epochs are "
        "those of batches of accumulate * batch samples",
        low=1,
        later=True,
    )
    freeze: list[str] = opt(
        [],
        "parts that stay as they are: names as in checkpoints (stem, 0-1, 4-6, head), 0..3 for all "
        "blocks of the chain between the states 0 and 3, patterns (4-*); their dropout goes on",
        later=True,
        changeable=True,
    )
    optimizer: str = opt(
        "adamw",
        "optimizer of every block; muon: matrices of the blocks, all else by adamw; your own: "
        "factory(parameter groups, lr) gives a torch Optimizer that treats each tensor on its own",
        choices=["adamw", "adam", "sgd", "muon"],
        open=True,
    )
    lr: float = opt(1e-3, "learning rate", above=0, changeable=True)
    chain_lr: float = opt(
        1.0,
        "tree: learning rate of the deployed chain's blocks (not stem and head) over lr",
        above=0,
        changeable=True,
    )
    weight_decay: float = opt(0.01, "weight decay", low=0, changeable=True)
    decay_norms: bool = opt(
        True,
        "false: no weight decay on norms and biases (fewer than two dimensions)",
        later=True,
        changeable=True,
    )
    momentum: float = opt(0.9, "momentum (sgd and muon)", low=0, high=1, changeable=True)
    betas: list[float] = opt(
        [0.9, 0.999], "adamw, adam, muon: the two decay rates", low=0, later=True, changeable=True
    )
    eps: float = opt(
        1e-8, "adamw, adam, muon: added to the root", above=0, later=True, changeable=True
    )
    schedule: str = opt(
        "constant",
        "learning rate over the run; your own: function(step, total_steps) gives a factor on lr",
        choices=["constant", "linear", "cosine"],
        open=True,
        changeable=True,
    )
    warmup: float = opt(
        0.0,
        "share of all steps with a rising learning rate",
        low=0,
        high=1,
        of_total=True,
        changeable=True,
    )
    clip: float = opt(0.0, "clip the global gradient norm; 0 = off", low=0, changeable=True)
    finish: float = opt(
        0.0,
        "tree: share of all steps, the last, by backpropagation of finish_path, on the same "
        "actors, with the same optimizer and schedule (chain_lr ends where it begins)",
        low=0,
        high=1,
        of_total=True,
        later=True,
    )
    coarsen: list[float] = opt(
        [],
        "tree: shares of all steps after which the finest level (of those left) is left out: what "
        "it has split becomes one block, of the chain's blocks there, in the end the whole chain; "
        "[0.4,0.7]: from 40 % of the steps on without one level, from 70 % without two",
        low=0,
        high=1,
        of_total=True,
        later=True,
    )
    finish_path: str = opt(
        "full", "the path of the last steps: full (the deployed chain) or spine-k", later=True
    )
    finish_sweeps: int = opt(
        0,
        "the last steps by so many sweeps over all blocks of the chain at once, forward and back "
        "(schedule/sweeps.py), in place of one block after the other; as many as there are nodes "
        "with blocks of the chain are backpropagation; 0 = none",
        low=0,
        high=4096,
        later=True,
    )
    patience: int = opt(
        0,
        "end the run after so many epochs without a better validation score of the full chain; "
        "0 = never",
        low=0,
        resumable=True,
        later=True,
    )

    def check(self) -> None:
        """What the optimizer and the schedule of the user's own bring with them."""
        if len(self.betas) != 2 or not max(self.betas) < 1:
            raise UserError(f"betas={self.betas}: two numbers from 0 to below 1, e.g. [0.9,0.95]")
        for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
            value = getattr(self, key)
            if value != default and self.optimizer not in ("adamw", "adam", "muon"):
                raise UserError(
                    f"{key}={value}: is for optimizer=adamw, adam or muon, not {self.optimizer}"
                )
        if self.warmup and dotted(self.schedule):
            raise UserError(
                f"warmup={self.warmup}: schedule={self.schedule} gives the whole curve; use 0"
            )

    @property
    def step_samples(self) -> int:
        """Samples of an optimizer step."""
        return self.batch * self.accumulate


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


@dataclass
class Records:
    """What is logged, scored and kept."""

    log_every: int = opt(50, "steps between rows of metrics.csv", low=1, resumable=True)
    loggers: list[str] = opt(
        ["tensorboard", "csv"],
        "what is written into the run folder: TensorBoard events, metrics.csv",
        choices=["tensorboard", "csv"],
        resumable=True,
    )
    wandb: str = opt("", "Weights & Biases project to log to", resumable=True)
    mlflow: str = opt("", "MLflow tracking URI to log to", resumable=True)
    eval_every: int = opt(1, "epochs between evaluations on the validation split", low=1)
    eval_test: bool = opt(
        False,
        "score the full chain on the test split there too; summary.json then has the highest score "
        "(chosen on the test split, so no estimate) and the mean of the last ten",
        resumable=True,
    )
    checkpoint_every: int = opt(
        0, "steps between checkpoints; 0 = at the end of each epoch", low=0, resumable=True
    )
    storage: str = opt(
        "",
        "checkpoints go to <storage>/<run name>: a folder or any fsspec URL (s3://…, gs://…); "
        "empty: the run folder",
        resumable=True,
    )
    keep_last: int = opt(2, "how many of the newest checkpoints stay", low=1, resumable=True)
    keep_best: bool = opt(
        True, "also keep the checkpoint with the best validation score", resumable=True
    )
