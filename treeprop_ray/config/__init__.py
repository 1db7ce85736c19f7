"""Settings: groups that carry their ranges and checks, and how they are read. No torch here."""

from treeprop_ray.config.fields import group, opt, walk
from treeprop_ray.config.loading import (
    EXPERIMENTS,
    LENGTH,
    Change,
    changes,
    computed,
    describe,
    differences,
    digest,
    experiment_file,
    experiment_layer,
    experiment_title,
    load,
    load_file,
    merge,
    parse_overrides,
    read_yaml,
    run_name,
    to_yaml,
)
from treeprop_ray.config.names import OWN, dotted, imported
from treeprop_ray.config.nested import TEXTS, Cff, Data, Model, Probe, RaySettings, Weights
from treeprop_ray.config.places import LOCAL, PUBLISHED, RUNS
from treeprop_ray.config.secrets import is_remote
from treeprop_ray.config.settings import CHANGEABLE, RESUMABLE, Settings, family_of, recurrent
from treeprop_ray.config.through_time import Time
from treeprop_ray.errors import hidden

__all__ = [
    "CHANGEABLE", "EXPERIMENTS", "LENGTH", "LOCAL", "OWN", "PUBLISHED", "RESUMABLE", "RUNS",
    "TEXTS", "Cff", "Change", "Data", "Model", "Probe", "RaySettings", "Settings", "Time",
    "Weights", "changes", "computed", "describe", "differences", "digest", "dotted",
    "experiment_file", "experiment_layer", "experiment_title", "family_of", "group", "hidden",
    "imported", "is_remote", "load", "load_file", "merge", "opt", "parse_overrides", "read_yaml",
    "recurrent", "run_name", "to_yaml", "walk",
]  # fmt: skip
