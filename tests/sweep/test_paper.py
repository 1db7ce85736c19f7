"""The commands that promise a table of the paper in full have the settings that the paper gives."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from treeprop_ray import config
from treeprop_ray.reporting import index
from treeprop_ray.sweep.command import sweep_of_command
from treeprop_ray.sweep.plan import Sweep
from treeprop_ray.sweep.space import same

PAPER: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "paper.yaml"))
COMMANDS: dict[str, Any] = PAPER["commands"]
Values = dict[str, Any]  # settings by their key


def full_commands() -> set[str]:
    every = {c for item in index.paper_items(Path()) for c in item.full}
    return {c for c in every if not c.startswith("python -m treeprop_ray.bench")}


def sweep_of(command: str) -> Sweep:
    """The sweep of a `make reproduce`."""
    words = dict(word.split("=", 1) for word in shlex.split(command)[2:])
    return sweep_of_command(f"python -m treeprop_ray.tune sweep={words['TABLE']} {words['ARGS']}")


def trials_of(command: str) -> list[Values]:
    """The settings of every run that a command starts, but for the seed."""
    if command.startswith("python"):
        return [values_of(config.load(shlex.split(command)[3:]))]
    sweep = sweep_of(command)
    return [values_of(sweep.trial(p, sweep.seeds[0]).settings) for p in sweep.all_points()]


def values_of(settings: config.Settings) -> Values:
    return {key: value for key, _, value in config.walk(settings)}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and not isinstance(value, bool):
        return bool(value == pytest.approx(wanted, rel=1e-6))
    return same(value, wanted)


def fits(trial: Values, where: Values) -> bool:
    return all(any(equal(trial[k], v) for v in listed(vs)) for k, vs in where.items())


def test_every_full_command_is_compared_here() -> None:
    assert full_commands() == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_command_has_the_papers_settings(command: str) -> None:
    entry, trials = COMMANDS[command], trials_of(command)
    for trial in trials:
        parts = [part for part in entry["trials"] if fits(trial, part["where"])]
        assert parts, f"no entry is for {trial}"
        wrong = {
            key: (trial[key], wanted)
            for part in parts
            for key, wanted in part["settings"].items()
            if not equal(trial[key], wanted)
        }
        assert not wrong, f"setting: (ours, the paper's) at {trial['name']}: {wrong}"
    for part in entry["trials"]:
        there = [trial for trial in trials if fits(trial, part["where"])]
        for key, values in part["where"].items():
            assert all(any(equal(t[key], v) for t in there) for v in listed(values)), (key, values)
    if "seeds" in entry:
        assert sweep_of(command).seeds == entry["seeds"]


@pytest.mark.parametrize("command", [c for c, entry in COMMANDS.items() if "metric" in entry])
def test_recurrent_tables_are_of_the_best_validation_epoch(command: str) -> None:
    space = sweep_of(command).space
    assert space.metric == COMMANDS[command]["metric"] in space.table.values.values()


def test_cff_in_the_classification_sweep_is_the_experiment_of_its_own() -> None:
    command = "python -m treeprop_ray.tune sweep=classification base={} method=[cff]"
    for base, alone in [("cifar10_vit", "cifar10_cff"), ("cifar10_vit_small", "cifar10_cff_small")]:
        sweep = sweep_of_command(command.format(base))
        trial = values_of(next(sweep.trials()).settings)
        own = values_of(config.load([f"experiment={alone}"]))
        # of the tree, of a run's length, and its name
        ignored = {"experiment", "name", "out", "log_every", "lr", "sigma", "chain_lr", "objective",
                   "weights.right", "alpha", "beta"}  # fmt: skip
        ignored |= {"epochs"} if alone.endswith("small") else set()
        assert {k for k, v in own.items() if not same(v, trial[k])} <= ignored
