"""Settings of a run, its training and its records: groups whose keys have no prefix. `Settings`
inherits them, those of machines.py and those of objective.py. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray.config.fields import opt
from treeprop_ray.config.names import dotted
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
    finish_from: str = opt(
        "chain",
        "what the last steps begin with: chain: the chain as the tree has trained it; path: the "
        "chain as its deepest path, whose auxiliary blocks take the places beside them, followed "
        "by layers that add nothing yet",
        choices=["chain", "path"],
        later=True,
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
    metrics: list[str] = opt(
        [],
        "your own, scored beside the loss after every evaluation: package.module:name of a "
        "function (outputs, targets) that gives a number, or of what makes one or an object of "
        "torchmetrics",
        resumable=True,
    )
    callbacks: list[str] = opt(
        [],
        "your own, package.module:factory; factory() gives a treeprop_ray.Callback (a class of "
        "yours is one)",
        resumable=True,
    )
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

    def check(self) -> None:
        """The user's own have names of a form, each its own."""
        for key in ("metrics", "callbacks"):
            names = getattr(self, key)
            for name in names:
                if not dotted(name):
                    raise UserError(f"{key}={name}: must be package.module:name")
            if len(set(names)) < len(names):
                raise UserError(f"{key}=[{','.join(names)}]: one of them is there twice")
