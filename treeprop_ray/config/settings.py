"""The settings: dataclasses whose fields carry their meaning and their range. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TEXTS = ("topics", "wikitext2", "wikitext103")  # data sets for language models


def opt(default: Any, help: str, **rule: Any) -> Any:
    """A field with its meaning and its rule: low=, high=, above=, choices=."""
    return field(default=default, metadata={"help": help, **rule})


def group(cls: type, help: str) -> Any:
    """A field that holds a nested dataclass of settings."""
    return field(default_factory=cls, metadata={"help": help})


@dataclass
class Model:
    """The network: stem, chain blocks and head."""

    name: str = opt("mlp", "which network", choices=["mlp", "vit", "gpt", "gru", "elman"])
    blocks: int = opt(7, "blocks before the head; N = blocks + 1 counts the head", low=1, high=4096)
    hidden: int = opt(
        64, "width of the states: hidden layers (mlp), tokens (vit, gpt)", low=1, high=2**16
    )
    activation: str = opt(
        "sigmoid", "mlp: nonlinearity", choices=["sigmoid", "tanh", "relu", "gelu"]
    )
    init: str = opt(
        "torch",
        "mlp: initial weights; torch: uniform, +-1/sqrt(inputs), biases too; xavier: "
        "Glorot's uniform times model.gain, biases 0",
        choices=["torch", "xavier"],
    )
    gain: float = opt(
        1.0,
        "mlp with init=xavier: factor, head too; 4 makes up for a sigmoid's slope, 1/4",
        above=0,
    )
    patch: int = opt(4, "vit: side of a square patch in pixels", low=1)
    heads: int = opt(6, "vit, gpt: attention heads; must divide model.hidden", low=1)
    mlp_ratio: float = opt(
        2.0, "vit, gpt: inner width of a block's MLP / model.hidden", above=0, high=64
    )
    dropout: float = opt(
        0.0,
        "vit, gpt: dropout in stem and blocks; masks are a function of (seed, step, block, piece), "
        "so another microbatches= draws other masks",
        low=0,
        high=0.9,
    )
    init_std: float = opt(
        0.02, "gpt: deviation of the initial weights; GPT-2's 0.02 is for widths from 768", above=0
    )
    output_block: bool = opt(
        False,
        "gpt: the last of the blocks is part of the head, so N = blocks and short paths end in it",
    )


@dataclass
class Data:
    """Where the samples come from."""

    name: str = opt(
        "digits",
        "data set",
        choices=["digits", "mnist", "cifar10", "cifar100", "tinyimagenet", "adding", *TEXTS],
    )
    root: str | None = opt(None, "folder laid out like the Hugging Face hub; else $TREEPROP_DATA")
    validation: float = opt(
        0.1, "share of the train split held out; WikiText has its own validation", above=0, high=0.9
    )
    limit: int = opt(0, "use only the first so many training samples; 0 = all", low=0)
    augment: str = opt(
        "none",
        "training images only; crop_flip: random shift by up to an eighth of the side and "
        "horizontal flip; standard: that and RandAugment (2 operations of magnitude 9, chosen for "
        "every 16 samples of a batch)",
        choices=["none", "crop_flip", "standard"],
    )
    permuted: bool = opt(False, "read the numbers of a sequence in one fixed random order")
    length: int = opt(64, "tokens of a text window, steps of the adding task", low=2, high=2**20)
    tokenizer: str = opt("bytes", "text: bytes, or GPT-2's BPE", choices=["bytes", "gpt2"])
    samples: int = opt(10000, "training samples of the adding task", low=10, high=10**7)


@dataclass
class Time:
    """TreeProp through time (model.name gru or elman): N = 2**depth symbols per sample."""

    depth: int = opt(
        4, "depth D of the time tree; a sample is cut into 2**D symbols", low=1, high=16
    )
    sweeps: int = opt(0, "consistency sweeps K of the deployed cell", low=0, high=1024)
    lambda_cons: float = opt(1.0, "weight of the consistency loss", low=0)
    recipe: str = opt(
        "paper",
        "paper: one learning rate, one gradient norm; boost: 3 lr for the deployed cell, and each "
        "cell's gradient clipped on its own; lookahead: that, and the deployed cell learns on its "
        "own states in place of the tree's, by the label that the coarser cells lead them to",
        choices=["paper", "boost", "lookahead"],
    )
    shards: int = opt(
        1,
        "engine=ray: actors that share the nodes of a wide depth; a power of 2",
        low=1,
        high=1024,
    )


@dataclass
class Cff:
    """Contrastive forward-forward with margin (method=cff)."""

    lr: float = opt(4e-3, "learning rate of the layers, in place of lr", above=0)
    head_lr: float = opt(5e-4, "learning rate of the head, in place of lr", above=0)
    head_share: float = opt(
        1 / 6, "share of all steps, the last, that train the head on frozen layers", above=0, high=1
    )
    tau: float = opt(0.15, "temperature of the contrastive loss", above=0)
    margin: str = opt(
        "linear",
        "how the margin goes from the first layer to the last",
        choices=["linear", "parabolic", "cosine"],
    )
    m_first: float = opt(0.4, "margin of the first layer; 0 and m_last=0: plain CFF", low=0, high=2)
    m_last: float = opt(0.1, "margin of the last layer", low=0, high=2)


@dataclass
class RaySettings:
    """Which Ray to use."""

    address: str = opt("", "an existing cluster (auto or ray://…); empty: a local Ray of our own")
    num_cpus: int = opt(0, "CPUs of the local Ray; 0 = all cores", low=0)
    dashboard: bool = opt(False, "start the dashboard of the local Ray (on 127.0.0.1)")


@dataclass
class Weights:
    """Weights of the three kinds of terms in the objective."""

    own: float = opt(1.0, "weight of the KL of a node to its forward transition", low=0)
    right: float = opt(1.0, "weight of the KL to the right prediction", low=0)
    ce: float = opt(1.0, "weight of the cross-entropy at the head", low=0)


@dataclass
class Probe:
    """Measurements on held-out batches during a run; the run goes on as if they were not there."""

    every: int = opt(0, "steps between probes (rows of probe.csv); 0 = none", low=0)
    batches: int = opt(4, "held-out batches of a probe, of the size batch", low=1, high=1024)
    draws: int = opt(16, "draws from q per sample for the bound F; 0 = leave it out", low=0)


@dataclass
class Settings:
    """All settings of a run."""

    experiment: str = opt("digits", "a file of experiments/, or a path to your own .yaml")
    name: str = opt(
        "", "name of the run folder; default: experiment, method and a hash of settings"
    )
    out: str = opt("results/runs", "folder that holds the run folders")
    fresh: bool = opt(False, "start anew even if the run folder holds a run")
    seed: int = opt(1, "seed of initialisation, data order and noise", low=0, high=2**31 - 1)

    method: str = opt(
        "tree",
        "TreeProp, plain backpropagation of the chain, or contrastive forward-forward with margin; "
        "through time: tree, bptt (the same cell, unrolled), bptt_fused (torch.nn.GRU)",
        choices=["tree", "bp", "cff", "bptt", "bptt_fused"],
    )
    engine: str = opt(
        "local",
        "one process, Ray actors, or (method=bp) Ray Train: data-parallel workers, `hosts` of them",
        choices=["local", "ray", "train"],
    )
    placement: str = opt(
        "auto",
        "per_node: an actor per tree node; packed: lines of nodes share actors; "
        "auto: per_node while every node can have a device of its own",
        choices=["auto", "per_node", "packed"],
    )
    hosts: int = opt(0, "number of actors when packed; 0 = one per device", low=0)
    cpus_per_actor: float = opt(0.0, "CPUs each actor asks Ray for; 0 = an equal share", low=0)
    gpus_per_actor: float = opt(
        -1.0, "GPUs each actor asks Ray for; -1 = an equal share of those there are", low=-1
    )
    strategy: str = opt(
        "PACK",
        "how Ray spreads the actors over machines",
        choices=["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
    )
    transport: str = opt(
        "store",
        "how tensors travel: object store, or Ray Direct Transport (alpha in Ray)",
        choices=["store", "gloo", "nccl", "nixl"],
    )
    in_flight: int = opt(2, "steps the driver submits ahead", low=1, high=64)
    snapshot_every: int = opt(50, "steps between recovery points in memory (ray)", low=1)
    max_failures: int = opt(8, "lost actors a run recovers from before it stops (ray)", low=0)
    wave_timeout: float = opt(600.0, "seconds before late actors end the run (ray)", above=0)
    timeline_steps: int = opt(3, "last steps drawn in timeline.json and waves.png; 0 = none", low=0)
    ray: RaySettings = group(RaySettings, "the Ray cluster")
    device: str = opt("auto", "auto takes a GPU when there is one", choices=["auto", "cpu", "cuda"])
    precision: str = opt(
        "float32", "bf16 = autocast of the blocks", choices=["float32", "bf16", "float64"]
    )
    threads: int = opt(1, "torch threads per process", low=1, high=1024)
    microbatches: int = opt(1, "pieces a batch is cut into; gradients add up", low=1)
    recompute: bool = opt(
        False,
        "bp: activation checkpointing; a block keeps its input only and runs again in the backward",
    )

    epochs: int = opt(30, "passes over the training data", low=1)
    steps: int = opt(0, "stop after so many steps; 0 = all epochs", low=0)
    batch: int = opt(64, "batch size", low=1)
    optimizer: str = opt("adamw", "optimizer of every block", choices=["adamw", "adam", "sgd"])
    lr: float = opt(1e-3, "learning rate", above=0)
    chain_lr: float = opt(
        1.0,
        "tree: learning rate of the deployed chain's blocks (not stem and head) over lr",
        above=0,
    )
    weight_decay: float = opt(0.01, "weight decay", low=0)
    momentum: float = opt(0.9, "momentum (sgd only)", low=0, high=1)
    schedule: str = opt(
        "constant", "learning rate over the run", choices=["constant", "linear", "cosine"]
    )
    warmup: float = opt(0.0, "share of all steps with a rising learning rate", low=0, high=1)
    clip: float = opt(0.0, "clip the global gradient norm; 0 = off", low=0)

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
        "gradient of the mean-reduced right loss, or the literal per-sample product (leaks labels)",
        choices=["mean", "vjp"],
    )
    correction_scale: float = opt(1.0, "factor on the correction", low=0)
    sigma: float = opt(0.0, "noise of the posterior samples (gaussian)", low=0)
    noise_schedule: str = opt(
        "depth", "depth: sigma * sqrt(2^(D-s)) at level s; flat: sigma", choices=["depth", "flat"]
    )
    mc_samples: int = opt(
        1, "Monte Carlo samples of the objective per training sample", low=1, high=4096
    )
    target_gradient: bool = opt(True, "differentiate both sides of the KLs")
    detach_levels: bool = opt(False, "cut all gradients between levels")
    weights: Weights = group(Weights, "weights of the objective's terms")

    model: Model = group(Model, "the network")
    data: Data = group(Data, "the data")
    time: Time = group(Time, "recurrent networks")
    probe: Probe = group(Probe, "alignment with backpropagation, KLs, bound, label leak")
    cff: Cff = group(Cff, "contrastive forward-forward")

    log_every: int = opt(50, "steps between rows of metrics.csv", low=1)
    eval_every: int = opt(1, "epochs between evaluations on the validation split", low=1)
    eval_test: bool = opt(
        False,
        "score the full chain on the test split there too; summary.json then has the highest score "
        "(chosen on the test split, so no estimate) and the mean of the last ten",
    )
    checkpoint_every: int = opt(0, "steps between checkpoints; 0 = at the end of each epoch", low=0)
    storage: str = opt(
        "",
        "checkpoints go to <storage>/<run name>: a folder or any fsspec URL (s3://…, gs://…); "
        "empty: the run folder",
    )
    keep_last: int = opt(2, "how many of the newest checkpoints stay", low=1)
    keep_best: bool = opt(True, "also keep the checkpoint with the best validation score")


# Settings that may differ when a run is taken up again: they do not change what is computed
# (`epochs` does under a decaying schedule; see `check_same_run`).
RESUMABLE = {
    "name", "out", "fresh", "engine", "device", "threads", "log_every", "checkpoint_every",
    "keep_last", "keep_best", "epochs", "steps", "data.root", "experiment", "placement", "hosts",
    "cpus_per_actor", "gpus_per_actor", "strategy", "transport", "in_flight", "timeline_steps",
    "snapshot_every", "max_failures", "wave_timeout", "storage", "recompute", "eval_test",
    "ray.address", "ray.num_cpus", "ray.dashboard", "probe.every", "probe.batches", "probe.draws",
    "time.shards",
}  # fmt: skip
