"""What trials leave behind when they fail, are stopped or die, and what a sweep runs again."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from treeprop_ray.config import RaySettings
from treeprop_ray.core.scoring import Score
from treeprop_ray.engine import runtime
from treeprop_ray.errors import UserError
from treeprop_ray.sweep.command import sweep_of
from treeprop_ray.sweep.plan import FAILED, FINISHED, STOPPED, Sweep, Trial
from treeprop_ray.sweep.runner import Follow, run_sweep
from treeprop_ray.sweep.settings import TuneSettings, load
from treeprop_ray.sweep.view import View
from treeprop_ray.sweep.worker import score_of, validation_of

TINY = """
base: digits
bases: {digits: {settings: {model.blocks: 2, model.hidden: 8, model.activation: relu,
  optimizer: sgd, epochs: 1, log_every: 100}}}
space: {lr: [0.02, 1.0e+15]}
"""


@pytest.fixture
def settings(tmp_path: Path) -> TuneSettings:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return load([f"sweep={tmp_path / 'tiny.yaml'}", f"storage={tmp_path / 'runs'}"])


@pytest.fixture
def follow(settings: TuneSettings) -> Follow:
    sweep = sweep_of(settings)
    return Follow(sweep, View("tiny", 2, 0, sweep.space.metric, Console(file=StringIO())))


@pytest.fixture
def two_cpus() -> Iterator[None]:
    runtime.start(RaySettings(num_cpus=2))
    yield
    runtime.stop()


@dataclass
class Ended:
    """What Tune says of a trial."""

    sweep: Sweep
    error: str = ""
    config: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.config = {**self.trial.point, "seed": self.trial.seed}

    @property
    def trial(self) -> Trial:
        return next(self.sweep.trials())

    def get_error(self) -> str:
        return self.error


def test_a_failed_trial_leaves_a_line_and_is_tried_again_a_finished_one_is_not(
    two_cpus: None, settings: TuneSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(settings)
    good, bad = sweep.trials()
    assert run_sweep(settings, sweep) == [bad.settings.name]
    assert [t.state() for t in (good, bad)] == [FINISHED, FAILED]
    (line,) = bad.error_file.read_text().splitlines()
    assert "=nan at node" in line and bad.error_file.with_suffix(".log").is_file()
    assert not good.error_file.exists() and good.error_file.with_suffix(".log").is_file()
    summary = good.folder / "summary.json"
    assert json.loads(summary.read_text())["command"] == good.command
    before = summary.stat().st_mtime_ns
    capsys.readouterr()
    assert run_sweep(settings, sweep) == [bad.settings.name]
    shown = capsys.readouterr().out
    assert "2 trials, 1 done before" in shown and shown.count("start ") == 1
    assert summary.stat().st_mtime_ns == before


def test_a_trial_that_the_scheduler_ends_keeps_its_epoch_and_is_done(follow: Follow) -> None:
    ended = Ended(follow.sweep)
    ended.trial.folder.mkdir(parents=True)
    follow.on_trial_start(1, [], ended)
    follow.on_trial_result(1, [], ended, {"epoch": 3, "score": 0.5})
    follow.on_trial_complete(1, [], ended)
    assert json.loads((ended.trial.folder / "stopped.json").read_text()) == {
        "epoch": 3,
        "score": 0.5,
    }
    assert ended.trial.state() == STOPPED and follow.failed == []


def test_a_process_that_dies_without_a_word_leaves_tunes_last_line(follow: Follow) -> None:
    ended = Ended(follow.sweep, "a traceback\nthe actor died\n")
    follow.on_trial_error(1, [], ended)
    assert ended.trial.error_file.read_text() == "the actor died"
    assert ended.trial.state() == FAILED and follow.failed == [ended.trial.settings.name]


def test_what_the_trial_itself_said_is_kept(follow: Follow) -> None:
    ended = Ended(follow.sweep, "a traceback of Tune")
    ended.trial.error_file.parent.mkdir(parents=True)
    ended.trial.error_file.write_text("the loss is not finite")
    follow.on_trial_error(1, [], ended)
    assert ended.trial.error_file.read_text() == "the loss is not finite"


def test_searches_look_at_the_validation_split_of_the_metrics_path() -> None:
    scores = {"full": Score(2.0, 0.25), "spine-1": Score(1.0, 0.5)}
    assert score_of("test/spine-1/accuracy", scores) == 0.5
    assert score_of("test/spine-9/loss", scores) == 2.0  # a method without it: the full chain
    assert score_of("test/spine-1/perplexity", scores) == pytest.approx(2.718281828)
    figures = {path: {"loss": s.loss, "accuracy": s.accuracy} for path, s in scores.items()}
    summary = {"final": {"validation": figures, "test": {}}}
    assert validation_of("best/full/accuracy", summary) == 0.25
    assert math.isnan(validation_of("leak", summary))


@pytest.mark.parametrize("words", [{"search": "optuna"}, {"scheduler": "asha"}])
def test_what_is_no_score_cannot_choose(settings: TuneSettings, words: dict[str, str]) -> None:
    file = Path(settings.sweep)
    file.write_text(file.read_text() + "metric: leak\n")
    sweep_of(settings)
    with pytest.raises(UserError, match=r"^metric=leak: is no score of a path, by which search="):
        sweep_of(dataclasses.replace(settings, **words))


def test_a_trial_that_makes_no_sense_for_its_method_is_refused_in_one_line(
    settings: TuneSettings,
) -> None:
    settings.overrides = ["probe.every=5", "method=bp"]
    with pytest.raises(UserError, match=r"sweep=tiny base=digits, lr=0.02: probe.every=5: "):
        list(sweep_of(settings).trials())
