"""Settings: typed dataclasses whose fields carry their meaning and their range. No torch here.

Order of precedence: defaults below < experiments/<name>.yaml < `key=value` on the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from treeprop_ray.errors import UserError

EXPERIMENTS = Path(__file__).parent / "experiments"


def opt(default: Any, help: str, **rule: Any) -> Any:
    """A field with its meaning and its rule: low=, high=, above=, choices=."""
    return field(default=default, metadata={"help": help, **rule})


def group(cls: type, help: str) -> Any:
    """A field that holds a nested dataclass of settings."""
    return field(default_factory=cls, metadata={"help": help})


@dataclass
class Model:
    """The network: stem, chain blocks and head."""

    name: str = opt("mlp", "which network", choices=["mlp", "vit", "gru", "elman"])
    blocks: int = opt(7, "blocks before the head; N = blocks + 1 counts the head", low=1, high=4096)
    hidden: int = opt(64, "width of the states: hidden layers (mlp), tokens (vit)", low=1)
    activation: str = opt(
        "sigmoid", "mlp: nonlinearity", choices=["sigmoid", "tanh", "relu", "gelu"]
    )
    patch: int = opt(4, "vit: side of a square patch in pixels", low=1)
    heads: int = opt(6, "vit: attention heads; must divide model.hidden", low=1)
    mlp_ratio: float = opt(
        2.0, "vit: inner width of a block's MLP / model.hidden", above=0, high=64
    )
    dropout: float = opt(
        0.0,
        "vit: dropout in stem and blocks; masks are a function of (seed, step, block, piece), "
        "so another microbatches= draws other masks",
        low=0,
        high=0.9,
    )


@dataclass
class Data:
    """Where the samples come from."""

    name: str = opt(
        "digits",
        "data set",
        choices=["digits", "mnist", "cifar10", "cifar100", "tinyimagenet", "adding"],
    )
    root: str | None = opt(None, "folder laid out like the Hugging Face hub; else $TREEPROP_DATA")
    validation: float = opt(
        0.1, "share of the train split held out for validation", low=0, high=0.9
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
    length: int = opt(64, "steps of the adding task", low=2, high=2**20)
    samples: int = opt(10000, "training samples of the adding task", low=10)


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
        "cell's gradient clipped on its own",
        choices=["paper", "boost"],
    )


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
        "TreeProp, or plain backpropagation of the chain; through time: tree, bptt (the same "
        "cell, unrolled), bptt_fused (torch.nn.GRU)",
        choices=["tree", "bp", "bptt", "bptt_fused"],
    )
    engine: str = opt("local", "one process, or Ray actors", choices=["local", "ray"])
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

    epochs: int = opt(30, "passes over the training data", low=1)
    steps: int = opt(0, "stop after so many steps; 0 = all epochs", low=0)
    batch: int = opt(64, "batch size", low=1)
    optimizer: str = opt("adamw", "optimizer of every block", choices=["adamw", "adam", "sgd"])
    lr: float = opt(1e-3, "learning rate", above=0)
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
    mc_samples: int = opt(1, "Monte Carlo samples of the objective per training sample", low=1)
    target_gradient: bool = opt(True, "differentiate both sides of the KLs")
    detach_levels: bool = opt(False, "cut all gradients between levels")
    weights: Weights = group(Weights, "weights of the objective's terms")

    model: Model = group(Model, "the network")
    data: Data = group(Data, "the data")
    time: Time = group(Time, "recurrent networks")

    log_every: int = opt(50, "steps between rows of metrics.csv", low=1)
    eval_every: int = opt(1, "epochs between evaluations on the validation split", low=1)
    checkpoint_every: int = opt(0, "steps between checkpoints; 0 = at the end of each epoch", low=0)
    keep_last: int = opt(2, "how many of the newest checkpoints stay", low=1)
    keep_best: bool = opt(True, "also keep the checkpoint with the best validation accuracy")


# Settings that may differ when a run is taken up again: they do not change what is computed
# (`epochs` does under a decaying schedule; see `check_same_run`).
RESUMABLE = {
    "name", "out", "fresh", "engine", "device", "threads", "log_every", "checkpoint_every",
    "keep_last", "keep_best", "epochs", "steps", "data.root", "experiment", "placement", "hosts",
    "cpus_per_actor", "gpus_per_actor", "strategy", "transport", "in_flight", "timeline_steps",
    "snapshot_every", "max_failures", "wave_timeout",
    "ray.address", "ray.num_cpus", "ray.dashboard",
}  # fmt: skip


def walk(obj: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """All leaf settings as (dotted key, field, value)."""
    for f in dataclasses.fields(obj):
        value = getattr(obj, f.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f, value


def check_field(key: str, f: dataclasses.Field[Any], value: Any) -> None:
    """Raise UserError when `value` breaks the rule of its field."""
    rule = f.metadata
    if "choices" in rule and value not in rule["choices"]:
        raise UserError(f"{key}={value}: one of {', '.join(rule['choices'])}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise UserError(f"{key}={value}: must be a finite number")
    if "low" in rule and value < rule["low"]:
        raise UserError(f"{key}={value}: must be at least {rule['low']}")
    if "above" in rule and value <= rule["above"]:
        raise UserError(f"{key}={value}: must be greater than {rule['above']}")
    if "high" in rule and value > rule["high"]:
        raise UserError(f"{key}={value}: must be at most {rule['high']}")


def check(settings: Any) -> None:
    """Check every field, then what only makes sense together."""
    for key, f, value in walk(settings):
        check_field(key, f, value)
    if not isinstance(settings, Settings):
        return
    if "/" in settings.name or settings.name in (".", ".."):
        raise UserError(f"name={settings.name}: a plain folder name without '/'")
    if settings.microbatches > settings.batch:
        raise UserError(
            f"microbatches={settings.microbatches}: at most batch={settings.batch} pieces"
        )
    check_model(settings.model)
    check_time(settings)
    if family_of(settings) == "bernoulli":
        if settings.model.name != "mlp":
            raise UserError(
                f"family=bernoulli: needs model.name=mlp with sigmoids, not {settings.model.name}"
            )
        if settings.model.activation != "sigmoid":
            raise UserError(
                f"family=bernoulli: needs model.activation=sigmoid, "
                f"not {settings.model.activation} (states must be probabilities)"
            )
        if settings.method == "tree" and abs(settings.alpha + settings.beta - 1) > 1e-9:
            raise UserError(
                f"alpha={settings.alpha} beta={settings.beta}: "
                "the Bernoulli family needs alpha + beta = 1"
            )
        if settings.sigma > 0:
            raise UserError(
                f"sigma={settings.sigma}: the Bernoulli family passes means on; use sigma=0"
            )
    if settings.alpha == 0 and settings.beta == 0:
        raise UserError("alpha=0 beta=0: the posterior mean would be zero; one must be positive")
    if settings.mc_samples > 1 and settings.sigma == 0:
        raise UserError(
            f"mc_samples={settings.mc_samples}: without noise (sigma=0) all samples are the same"
        )


def check_model(model: Model) -> None:
    """What must fit together inside a network; what depends on the data is checked with it."""
    if model.name == "vit":
        if model.hidden % model.heads:
            raise UserError(
                f"model.heads={model.heads}: must divide model.hidden={model.hidden}, one of "
                f"{', '.join(str(h) for h in range(1, model.hidden + 1) if model.hidden % h == 0)}"
            )
        if round(model.mlp_ratio * model.hidden) < 1:
            raise UserError(
                f"model.mlp_ratio={model.mlp_ratio}: leaves the MLP no width at "
                f"model.hidden={model.hidden}; at least {1 / model.hidden:.3g}"
            )
    elif model.dropout > 0:
        raise UserError(f"model.dropout={model.dropout}: only model.name=vit has dropout; use 0")


def recurrent(settings: Settings) -> bool:
    """Whether the tree is over time steps."""
    return settings.model.name in ("gru", "elman")


def check_time(settings: Settings) -> None:
    """What a recurrent network can and cannot do, and what only it can."""
    s, model = settings, settings.model.name
    if not recurrent(s):
        if s.method in ("bptt", "bptt_fused"):
            raise UserError(f"method={s.method}: needs model.name=gru or elman, not {model}")
        for key, used in (("permuted", s.data.permuted), ("name", s.data.name == "adding")):
            if used:
                value = str(getattr(s.data, key)).lower()
                raise UserError(
                    f"data.{key}={value}: needs model.name=gru or elman, not {model} (a sequence)"
                )
        return
    if s.method == "bp":
        raise UserError(f"method=bp: for model.name={model} use method=bptt")
    if s.method == "bptt_fused" and model != "gru":
        raise UserError(f"method=bptt_fused: torch has no fused {model} cell; use method=bptt")
    if s.engine == "ray" and s.method != "tree":
        raise UserError(f"engine=ray: method={s.method} is one chain of steps; use engine=local")
    if s.family == "bernoulli":
        raise UserError(f"family=bernoulli: model.name={model} passes its states on as they are")
    for key, neutral in (("sigma", 0), ("beta", 0), ("mc_samples", 1)):
        if getattr(s, key) != neutral:
            raise UserError(
                f"{key}={getattr(s, key)}: recurrent networks pass the forward state on; "
                f"use {key}={neutral}"
            )


def family_of(settings: Settings) -> str:
    """The family after `auto` is resolved."""
    if settings.family != "auto":
        return settings.family
    sigmoid = settings.model.name == "mlp" and settings.model.activation == "sigmoid"
    return "bernoulli" if sigmoid else "gaussian"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())


def read_yaml(path: Path, what: str) -> DictConfig:
    """A YAML mapping from a file; a mistake names the file."""
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError as e:
        raise UserError(f"{what}: no such file") from e
    except Exception as e:  # yaml and omegaconf raise many kinds; all are the file's fault
        raise UserError(f"{what}: not readable as YAML: {_one_line(e)}") from e
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{what}: must hold key: value lines")
    return loaded


def experiment_file(name: str) -> Path:
    """The YAML of an experiment: a shipped name or a path."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    path = EXPERIMENTS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in EXPERIMENTS.glob("*.yaml")))
        raise UserError(f"experiment={name}: one of {known}, or a path that ends in .yaml")
    return path


def parse_overrides(args: Sequence[str]) -> DictConfig:
    """`key=value` words to a config; the value is read as YAML."""
    for word in args:
        key, eq, _ = word.partition("=")
        if not eq or not key.strip():
            raise UserError(f"{word!r}: expected key=value")
    try:
        return OmegaConf.from_dotlist(list(args))
    except Exception as e:
        raise UserError(f"{' '.join(args)}: not readable as key=value: {_one_line(e)}") from e


def _check_groups(schema: type, source: str, layer: DictConfig) -> None:
    """`model=3` is a mistake that omegaconf reports without naming the key."""
    for f in dataclasses.fields(schema):
        if isinstance(f.default_factory, type) and f.name in layer:
            value = OmegaConf.to_container(layer)[f.name]
            if not isinstance(value, dict):
                raise UserError(
                    f"{source}{f.name}={value}: is a group of settings; use {f.name}.<key>=…"
                )


def merge(schema: type, *layers: tuple[str, DictConfig]) -> Any:
    """Lay configs over the defaults of the dataclass `schema` and check the result."""
    base = OmegaConf.structured(schema)
    known = [key for key, _, _ in walk(schema())]
    for source, layer in layers:
        _check_groups(schema, source, layer)
        try:
            base = OmegaConf.merge(base, layer)
        except ConfigKeyError as e:
            key = e.full_key or str(e.key)
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else "; --help lists all keys"
            raise UserError(f"{source}unknown key {key}{hint}") from e
        except OmegaConfBaseException as e:
            key = e.full_key or ""
            raise UserError(f"{source}{key + ': ' if key else ''}{_one_line(e)}") from e
        except Exception as e:
            raise UserError(f"{source}{_one_line(e)}") from e
    try:
        settings = OmegaConf.to_object(base)
    except Exception as e:
        raise UserError(_one_line(e)) from e
    check(settings)
    return settings


def load(args: Sequence[str]) -> Settings:
    """Settings from command-line words: defaults < experiment < words."""
    words = parse_overrides(args)
    name = words.get("experiment", Settings().experiment)
    if not isinstance(name, str):
        raise UserError(f"experiment={name}: must be a name or a path")
    path = experiment_file(name)
    source = f"{path.name}: "
    return cast(
        Settings, merge(Settings, (source, read_yaml(path, f"experiment={name}")), ("", words))
    )


def load_file(path: Path) -> Settings:
    """Settings that an earlier run wrote to its config.yaml."""
    return cast(Settings, merge(Settings, (f"{path}: ", read_yaml(path, str(path)))))


def to_yaml(settings: Any) -> str:
    """The resolved settings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings))


def differences(old: Settings, new: Settings) -> list[str]:
    """Settings that differ and change what is computed, as `key: old -> new`."""
    a = {k: v for k, _, v in walk(old)}
    b = {k: v for k, _, v in walk(new)}
    moving = set(RESUMABLE)
    if old.schedule != "constant" or old.warmup > 0:
        moving -= {"epochs", "steps"}  # the learning rate at step t depends on the total
    return [f"{k}: {a[k]} -> {b[k]}" for k in a if a[k] != b[k] and k not in moving]


def run_name(settings: Settings) -> str:
    """The given name, or one that is the same for the same command."""
    if settings.name:
        return settings.name
    science = {k: v for k, _, v in walk(settings) if k not in RESUMABLE or k in ("epochs", "steps")}
    digest = hashlib.sha256(json.dumps(science, sort_keys=True).encode()).hexdigest()[:6]
    return f"{Path(settings.experiment).stem}-{settings.method}-s{settings.seed}-{digest}"


def describe(schema: type) -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every setting, for --help."""
    rows = []
    for key, f, value in walk(schema()):
        rule = f.metadata
        text = rule["help"]
        if "choices" in rule:
            text += f" [{'|'.join(rule['choices'])}]"
        shown = (
            ""
            if value in (None, "")
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
        )
        rows.append((key, shown, text))
    return rows
