"""What the tune command is told: its own settings, and words for the base experiment. No torch."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeprop_ray import config
from treeprop_ray.config import LOCAL, PUBLISHED, RUNS, RaySettings, group, opt, spaces
from treeprop_ray.errors import UserError

NEUTRAL = ("storage", "out", "max_concurrent", "wandb", "mlflow", "ray")  # change no figure


@dataclass
class TuneSettings:
    """Settings of the tune command."""

    sweep: str = opt("", "a file of tune_spaces/, or a path to your own .yaml")
    base: str = opt("", "experiment behind the trials; default: the one the sweep names")
    seeds: Any = opt(None, "list of seeds; default: those of the sweep")
    search: str = opt(
        "grid", "all settings, random ones, or Optuna's", choices=["grid", "random", "optuna"]
    )
    samples: int = opt(20, "settings to try with search=random or optuna", low=1)
    scheduler: str = opt(
        "none",
        "asha: end weak trials early; pbt: weak ones take over from strong ones and vary settings",
        choices=["none", "asha", "pbt"],
    )
    max_concurrent: int = opt(0, "trials at the same time; 0 = as many as fit", low=0)
    storage: str = opt(RUNS, "folder of the run folders; on a cluster one that all machines see")
    out: str = opt(LOCAL, f"folder of table and figure; --record: {PUBLISHED}")
    wandb: str = opt("", "Weights & Biases project to log to")
    mlflow: str = opt("", "MLflow tracking URI to log to")
    ray: RaySettings = group(RaySettings)
    overrides: Any = opt(None, "not a key: every other key=value goes to the base experiment")
    command: str = opt("", "not a key: how the sweep was called")


def load(words: Sequence[str]) -> TuneSettings:
    """Settings of this command, and the words that are for the base experiment."""
    own = {f.name for f in dataclasses.fields(TuneSettings)} - {"overrides", "command"}
    config.parse_overrides(words)
    roots = [word.partition("=")[0].partition(".")[0] for word in words]
    mine = [w for w, root in zip(words, roots, strict=True) if root in own]
    settings: TuneSettings = config.merge(TuneSettings, ("", config.parse_overrides(mine)))
    settings.overrides = [w for w, root in zip(words, roots, strict=True) if root not in own]
    counted = [w for w, root in zip(words, roots, strict=True) if root not in NEUTRAL]
    settings.command = shlex.join(["python", "-m", "treeprop_ray.tune", *counted])
    if "://" in settings.storage:
        raise UserError(f"storage={settings.storage}: run folders need a folder, not a URL")
    if not settings.sweep:
        raise UserError(
            f"sweep= : one of {', '.join(spaces.shipped())}, or a path of your own .yaml"
        )
    return settings
