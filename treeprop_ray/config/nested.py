"""Groups of settings with a prefix of their own, `model.hidden` or `ray.address`. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray.config.fields import LARGEST, opt
from treeprop_ray.config.names import dotted
from treeprop_ray.errors import UserError

TEXTS = ("topics", "wikitext2", "wikitext103")  # data sets for language models


@dataclass
class Model:
    """The network: stem, chain blocks and head."""

    name: str = opt(
        "mlp",
        "which network; mingru: a recurrent baseline that a scan trains (method=bptt)",
        choices=["mlp", "vit", "gpt", "gru", "elman", "mingru"],
        open=True,
    )
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
    group: list[int] = opt(
        [],
        "layers (model.blocks of them) in each block of the tree: 2 for all, the last ones longer "
        "where it does not divide, or [2,2,3] one by one; [] = 1. The chain is exported layer by "
        "layer",
        low=1,
        high=4096,
        single=True,
        later=True,
    )
    auxiliary_layers: int = opt(
        1,
        "layers of an auxiliary block, at most those of the chain beside it",
        low=1,
        high=4096,
        later=True,
    )
    span: float = opt(
        0.0,
        "choose model.group: the deepest tree whose critical path is at most this share of "
        "backpropagation's (--cfg shows it); 0 = as model.group says",
        low=0,
        high=1,
        later=True,
    )
    recurrent: bool = opt(
        False,
        "model.name=package.module:factory: factory(settings.model, inputs) gives a recurrent "
        "cell, a module (x, h) -> h with model.hidden numbers in h; the tree is over time",
        later=True,
    )

    @property
    def layers(self) -> int:
        """Layers of a shipped network before its head."""
        return self.blocks - self.output_block

    def check(self) -> None:
        """What fits together in a shipped network; what depends on the data is checked with it."""
        if self.span and self.group:
            raise UserError(f"model.span={self.span}: chooses model.group; leave out {self.group}")
        if self.recurrent and not dotted(self.name):
            raise UserError(
                f"model.recurrent=true: says that model.name=package.module:factory gives a cell; "
                f"leave it out with {self.name}"
            )
        if dotted(self.name):
            return
        if len(self.group) > 1 and sum(self.group) != self.layers:
            raise UserError(
                f"model.group={self.group}: has {sum(self.group)} layers, must have the "
                f"{self.layers} before the head"
            )
        if self.name in ("vit", "gpt"):
            if self.hidden % self.heads:
                divisors = [str(h) for h in range(1, self.hidden + 1) if self.hidden % h == 0]
                raise UserError(
                    f"model.heads={self.heads}: must divide model.hidden={self.hidden}, one of "
                    f"{', '.join(divisors)}"
                )
            if round(self.mlp_ratio * self.hidden) < 1:
                raise UserError(
                    f"model.mlp_ratio={self.mlp_ratio}: leaves the MLP no width at "
                    f"model.hidden={self.hidden}; at least {1 / self.hidden:.3g}"
                )
        elif self.dropout > 0:
            raise UserError(
                f"model.dropout={self.dropout}: only model.name=vit and gpt have dropout; use 0"
            )
        if self.output_block and self.name != "gpt":
            raise UserError(f"model.output_block=true: needs model.name=gpt, not {self.name}")
        if self.output_block and self.blocks < 2:
            raise UserError(f"model.blocks={self.blocks}: at least 2 with model.output_block=true")
        if self.init != "torch" and self.name != "mlp":
            raise UserError(f"model.init={self.init}: is for model.name=mlp, not {self.name}")
        if self.gain != 1 and self.init != "xavier":
            raise UserError(f"model.gain={self.gain}: needs model.init=xavier, not {self.init}")


@dataclass
class Data:
    """Where the samples come from."""

    name: str = opt(
        "digits",
        "data set",
        choices=["digits", "mnist", "cifar10", "cifar100", "tinyimagenet", "adding", *TEXTS],
        open=True,
    )
    root: str | None = opt(
        None, "folder laid out like the Hugging Face hub; else $TREEPROP_DATA", resumable=True
    )
    validation: float = opt(
        0.1, "share of the train split held out; WikiText has its own validation", above=0, high=0.9
    )
    limit: int = opt(0, "use only the first so many training samples; 0 = all", low=0)
    augment: str = opt(
        "none",
        "training images only; crop_flip: random shift by up to an eighth of the side and "
        "horizontal flip; standard: that and RandAugment (2 operations of magnitude 9)",
        choices=["none", "crop_flip", "standard"],
    )
    augment_group: int = opt(
        16,
        "augment=standard: samples of a batch that share RandAugment's choice of operations; 1 = "
        "each has its own",
        low=1,
        later=True,
    )
    permuted: bool = opt(False, "read the numbers of a sequence in one fixed random order")
    length: int = opt(64, "tokens of a text window, steps of the adding task", low=2, high=2**20)
    tokenizer: str = opt("bytes", "text: bytes, or GPT-2's BPE", choices=["bytes", "gpt2"])
    samples: int = opt(10000, "training samples of the adding task", low=10, high=10**7)
    columns: str = opt(
        "",
        "own data with named columns: of the inputs and, the last, of the labels, e.g. img,label",
    )
    classes: int = opt(
        0, "own data: how many classes; 0 = as its labels or its features say", low=0, high=2**31
    )
    epoch_steps: int = opt(
        0, "steps that count as an epoch of a stream without length; 0 = all", low=0, resumable=True
    )

    def check(self) -> None:
        """Only text has a tokenizer."""
        if self.tokenizer != "bytes" and self.name not in TEXTS and not dotted(self.name):
            raise UserError(f"data.tokenizer={self.tokenizer}: data.name={self.name} is no text")
        for key in ("columns", "classes", "epoch_steps"):
            if getattr(self, key) and not dotted(self.name):
                raise UserError(
                    f"data.{key}={getattr(self, key)}: is for own data, "
                    f"data.name=package.module:factory; {self.name} knows its own"
                )


@dataclass
class Loss:
    """The loss at the head; `loss=mse` is short for loss.name=mse."""

    name: str = opt(
        "cross_entropy",
        "cross_entropy: one label of several; bce: several labels, each 0 or 1; mse: numbers; or "
        "package.module:function(outputs, targets) that gives a loss per sample",
        choices=["cross_entropy", "mse", "bce"],
        open=True,
        later=True,
    )
    label_smoothing: float = opt(
        0.0, "cross_entropy: share of the target given to all classes", low=0, high=1, later=True
    )
    ignore_index: int = opt(
        -100, "cross_entropy, bce: a label of this value does not count", later=True
    )
    class_weights: list[float] = opt(
        [], "cross_entropy: a weight for every class; [] = all 1", later=True
    )

    def check(self) -> None:
        """Which loss has what."""
        cross_entropy = self.name == "cross_entropy"
        if self.label_smoothing and not cross_entropy:
            raise UserError(
                f"loss.label_smoothing={self.label_smoothing}: is for loss.name=cross_entropy, "
                f"not {self.name}"
            )
        if self.class_weights and not cross_entropy:
            raise UserError(
                f"loss.class_weights={self.class_weights}: is for loss.name=cross_entropy, "
                f"not {self.name}"
            )
        if any(not 0 <= weight <= LARGEST for weight in self.class_weights):
            raise UserError(
                f"loss.class_weights={self.class_weights}: must be numbers of at least 0"
            )
        if self.class_weights and not any(self.class_weights):
            raise UserError(f"loss.class_weights={self.class_weights}: one must be positive")
        if self.ignore_index != -100 and self.name not in ("cross_entropy", "bce"):
            raise UserError(
                f"loss.ignore_index={self.ignore_index}: is for loss.name=cross_entropy and bce, "
                f"not {self.name}"
            )


@dataclass
class Cff:
    """Contrastive forward-forward with margin (method=cff)."""

    lr: float = opt(4e-3, "learning rate of the layers, in place of lr", above=0, changeable=True)
    head_lr: float = opt(
        5e-4, "learning rate of the head, in place of lr", above=0, changeable=True
    )
    head_share: float = opt(
        1 / 6,
        "share of all steps, the last, that train the head on frozen layers",
        above=0,
        high=1,
        of_total=True,
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

    address: str = opt(
        "", "an existing cluster (auto or ray://…); empty: a local Ray of our own", resumable=True
    )
    num_cpus: int = opt(0, "CPUs of the local Ray; 0 = all cores", low=0, resumable=True)
    dashboard: bool = opt(
        False, "start the dashboard of the local Ray (on 127.0.0.1)", resumable=True
    )


@dataclass
class Weights:
    """Weights of the three kinds of terms in the objective."""

    own: float = opt(1.0, "weight of the KL of a node to its forward transition", low=0)
    right: float = opt(1.0, "weight of the KL to the right prediction", low=0)
    ce: float = opt(1.0, "weight of the cross-entropy at the head", low=0)


@dataclass
class Probe:
    """Measurements on held-out batches during a run; the run goes on as if they were not there."""

    every: int = opt(0, "steps between probes (rows of probe.csv); 0 = none", low=0, resumable=True)
    batches: int = opt(
        4, "held-out batches of a probe, of the size batch", low=1, high=1024, resumable=True
    )
    draws: int = opt(
        16, "draws from q per sample for the bound F; 0 = leave it out", low=0, resumable=True
    )
