"""Settings: groups that carry their ranges and checks, and how they are read. No torch here."""

from treeprop_ray.config.checks import family_of, recurrent, walk
from treeprop_ray.config.loading import (
    EXPERIMENTS,
    describe,
    differences,
    experiment_file,
    load,
    load_file,
    merge,
    parse_overrides,
    read_yaml,
    run_name,
    to_yaml,
)
from treeprop_ray.config.settings import (
    RESUMABLE,
    Cff,
    Data,
    Model,
    RaySettings,
    Settings,
    Time,
    group,
    opt,
)

__all__ = [
    "EXPERIMENTS", "RESUMABLE", "Cff", "Data", "Model", "RaySettings", "Settings", "Time",
    "describe", "differences", "experiment_file", "family_of", "group", "load", "load_file", "merge", "opt",
    "parse_overrides", "read_yaml", "recurrent", "run_name", "to_yaml", "walk",
]  # fmt: skip
