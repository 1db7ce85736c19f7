"""A population without Ray: members pause, take over and go on, each in its own run folder."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from treeprop_ray.run.trainer import Trainer
from treeprop_ray.sweep import population
from treeprop_ray.sweep.command import sweep_of_command
from treeprop_ray.sweep.plan import FINISHED, PART, Sweep, Trial
from treeprop_ray.sweep.population import Population, explored, rounds
from treeprop_ray.sweep.rows import rows_of
from treeprop_ray.sweep.worker import Paused, Pausing, as_member

SPACE = """
base: digits
bases: {digits: {settings: {model.blocks: 2, model.hidden: 8, epochs: 2, data.limit: 200}}}
space: {lr: [0.05, 0.01, 1.0e-06]}
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "few.yaml").write_text(SPACE)
    command = f"python -m treeprop_ray.tune sweep={tmp_path / 'few.yaml'} scheduler=pbt"
    return sweep_of_command(command, str(tmp_path / "runs"))


def train(trial: Trial, values: dict[str, float], until: int) -> None:
    settings = as_member(trial.settings, values)
    run = Trainer.of(settings, trial.command, [Pausing("test/full/accuracy", until)])
    if until < settings.epochs:
        with pytest.raises(Paused):
            run.train()
    else:
        run.train()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return {k: v for p in newest.glob("*.safetensors") for k, v in load_file(p).items()}


def test_a_member_takes_over_weights_and_goes_on_with_settings_near_those(sweep: Sweep) -> None:
    members = list(sweep.trials())
    state = Population.of(sweep)
    for trial in members:
        train(trial, state.values[trial.settings.name], 1)
    assert {trial.state() for trial in members} == {PART}
    names = [trial.settings.name for trial in members]
    scores = dict(zip(names, (0.9, 0.5, 0.1), strict=True))
    state.decide(sweep, scores, 1)
    again = Population.of(sweep)  # as after an interruption: what was decided is done
    assert again.decided(1) and again.moved == 0
    again.move(sweep, 1)
    again.move(sweep, 1)
    (move,) = again.moves
    assert (move["member"], move["source"]) == (names[2], names[0])
    a, b = weights(members[0].folder), weights(members[2].folder)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    for trial in members:
        train(trial, again.values[trial.settings.name], 2)
    assert {trial.state() for trial in members} == {FINISHED}
    stories = [row.get("population", "") for row in rows_of(sweep)]
    assert stories[:2] == ["", ""] and f"epoch 1: weights of {names[0]}, lr=0.0" in stories[2]
    assert all(set(population.reached(trial)) == {1, 2} for trial in members)


def test_settings_are_varied_near_those_taken_over() -> None:
    gen = random.Random(1)
    axes = {"lr": [0.1, 0.2, 0.3], "clip": {"uniform": [0.5, 1.0]}}
    seen = [explored({"lr": 0.1, "clip": 1.0}, axes, gen) for _ in range(20)]
    assert {one["lr"] for one in seen} == {0.1, 0.2} and {one["clip"] for one in seen} == {0.8, 1}
    assert rounds(1) == [1] and rounds(4) == [1, 2, 3, 4] and rounds(10) == [2, 4, 6, 8, 10]
    assert rounds(11) == [2, 4, 6, 8, 10, 11]
