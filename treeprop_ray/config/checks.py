"""Whether settings make sense: each field alone, and what must fit together. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from treeprop_ray.config.settings import TEXTS, Model, Settings, Time
from treeprop_ray.errors import UserError

LARGEST = 2**53  # beyond it a float no longer holds every integer


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
    if isinstance(value, str) and not value.isprintable():
        raise UserError(f"{key}={value}: must not hold control characters")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not abs(value) <= LARGEST:  # true for NaN as well
        raise UserError(f"{key}={value}: must be a finite number of at most {LARGEST}")
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
    check_text(settings)
    check_time(settings)
    if settings.probe.every and (settings.method != "tree" or recurrent(settings)):
        raise UserError(
            f"probe.every={settings.probe.every}: compares TreeProp over blocks with "
            f"backpropagation; method={settings.method} model.name={settings.model.name} needs 0"
        )
    if settings.chain_lr != 1 and recurrent(settings):
        raise UserError(
            f"chain_lr={settings.chain_lr}: is for trees over blocks; through time use time.recipe"
        )
    check_baselines(settings)
    if settings.model.init != "torch" and settings.model.name != "mlp":
        raise UserError(
            f"model.init={settings.model.init}: is for model.name=mlp, not {settings.model.name}"
        )
    if settings.model.gain != 1 and settings.model.init != "xavier":
        raise UserError(
            f"model.gain={settings.model.gain}: needs model.init=xavier, not {settings.model.init}"
        )
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
    if model.name in ("vit", "gpt"):
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
        raise UserError(
            f"model.dropout={model.dropout}: only model.name=vit and gpt have dropout; use 0"
        )
    if model.output_block and model.name != "gpt":
        raise UserError(f"model.output_block=true: needs model.name=gpt, not {model.name}")
    if model.output_block and model.blocks < 2:
        raise UserError(f"model.blocks={model.blocks}: at least 2 with model.output_block=true")


def check_text(settings: Settings) -> None:
    """Text needs a language model, and a language model text."""
    s, model, data = settings, settings.model.name, settings.data
    if (model == "gpt") != (data.name in TEXTS):
        what = "one of " + ", ".join(TEXTS) if model == "gpt" else "text needs model.name=gpt"
        raise UserError(f"data.name={data.name} with model.name={model}: {what}")
    if data.tokenizer != "bytes" and data.name not in TEXTS:
        raise UserError(f"data.tokenizer={data.tokenizer}: data.name={data.name} is no text")
    if model == "gpt" and data.augment != "none":
        raise UserError(f"data.augment={data.augment}: is for images; use none")
    if model == "gpt" and s.method == "bp" and s.engine == "ray":
        raise UserError(
            "method=bp engine=ray: the head of model.name=gpt uses the stem's weights, so the two "
            "cannot be different stages of a chain; use engine=local"
        )


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
    if s.engine == "ray" and s.placement == "packed":
        raise UserError(f"placement=packed: model.name={model} has an actor per depth; use auto")
    if s.engine == "ray" and s.hosts:
        raise UserError(f"hosts={s.hosts}: model.name={model} has an actor per depth; use 0")
    check_windows(s.time)
    if s.family == "bernoulli":
        raise UserError(f"family=bernoulli: model.name={model} passes its states on as they are")
    for key, neutral in (("sigma", 0), ("beta", 0), ("mc_samples", 1)):
        if getattr(s, key) != neutral:
            raise UserError(
                f"{key}={getattr(s, key)}: recurrent networks pass the forward state on; "
                f"use {key}={neutral}"
            )


def check_windows(time: Time) -> None:
    """Shards of equal size, none shorter than what the sweeps look back on; what a recipe lacks."""
    shards, nodes = time.shards, 2 ** (time.depth - 1)
    if shards & (shards - 1) or shards > nodes:
        raise UserError(
            f"time.shards={shards}: a power of 2, at most {nodes} (the nodes of the finest depth)"
        )
    if shards > 1 and time.recipe == "lookahead":
        raise UserError(
            f"time.shards={shards}: time.recipe=lookahead has one actor per depth; use 1"
        )
    if time.sweeps and time.recipe == "lookahead":
        raise UserError(
            f"time.sweeps={time.sweeps}: time.recipe=lookahead has none, the deployed cell goes "
            "over its own states; use 0"
        )
    if shards > 1 and time.sweeps // 2 > nodes // shards:
        raise UserError(
            f"time.shards={shards}: a window of {nodes // shards} nodes is shorter than what "
            f"time.sweeps={time.sweeps} looks back on; use fewer"
        )


def check_baselines(settings: Settings) -> None:
    """What the methods that TreeProp is compared with can and cannot do."""
    s = settings
    if s.engine == "train":
        if s.method != "bp":
            raise UserError(f"engine=train: is for method=bp, not {s.method}; use engine=ray")
        if s.hosts * s.microbatches > s.batch:
            raise UserError(
                f"hosts={s.hosts} microbatches={s.microbatches}: more pieces than batch={s.batch}"
            )
    if s.recompute and s.method != "bp":
        raise UserError(f"recompute=true: is for method=bp, not {s.method}")
    if s.method == "cff":
        if s.model.name not in ("mlp", "vit"):
            raise UserError(f"method=cff: needs model.name=mlp or vit, not {s.model.name}")
        if s.microbatches > 1:
            raise UserError(
                f"microbatches={s.microbatches}: method=cff compares all samples of a batch with "
                "each other; use microbatches=1"
            )


def family_of(settings: Settings) -> str:
    """The family after `auto` is resolved."""
    if settings.family != "auto":
        return settings.family
    sigmoid = settings.model.name == "mlp" and settings.model.activation == "sigmoid"
    return "bernoulli" if sigmoid else "gaussian"
