"""What runs draw and probe along the way, as callbacks of the trainer."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest

from treeprop_ray import config
from treeprop_ray.config import Settings
from treeprop_ray.core.tree import Tree
from treeprop_ray.reporting.callbacks import Figures, standard
from treeprop_ray.reporting.plot import label_points, plt
from treeprop_ray.reporting.probing import add_rows
from treeprop_ray.run.trainer import Trainer


def settings_in(folder: Path, *words: str) -> Settings:
    tiny = ["model.hidden=8", "model.blocks=2", "probe.every=8", "probe.batches=1", "probe.draws=0"]
    return config.load([*tiny, "steps=20", f"out={folder}", "name=run", *words])


def steps_in(path: Path) -> list[int]:
    with path.open(newline="") as f:
        return [int(row["step"]) for row in csv.DictReader(f)]


def test_rows_before_the_first_step_every_so_many_and_at_the_end(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    Trainer.of(settings, callbacks=standard(settings)).train()
    assert steps_in(tmp_path / "run" / "probe.csv") == [0, 8, 16, 20]
    drawn = {path.stem for path in (tmp_path / "run" / "figures").iterdir()}
    assert {"tree_loss", "path_accuracy", "probe_alignment", "probe_kl"} <= drawn
    assert "waves" not in drawn and not (tmp_path / "run" / "timeline.json").exists()
    longer = settings_in(tmp_path, "steps=30")
    Trainer.of(longer, callbacks=standard(longer)).train()
    assert steps_in(tmp_path / "run" / "probe.csv") == [0, 8, 16, 20, 24, 30]


def test_rows_are_in_the_order_of_steps_and_a_new_one_replaces_the_old(tmp_path: Path) -> None:
    path, tree = tmp_path / "probe.csv", Tree(2)
    add_rows(path, [{"step": 8, "cosine": 0.1}, {"step": 20, "cosine": 0.2}], tree)
    add_rows(path, [{"step": 20, "cosine": 0.5}, {"step": 0, "cosine": 0.3}], tree)
    with path.open(newline="") as f:
        rows = [(row["step"], row["cosine"]) for row in csv.DictReader(f)]
    assert rows == [("0", "0.3"), ("8", "0.1"), ("20", "0.5")]
    assert [p.name for p in tmp_path.iterdir()] == ["probe.csv"]


def test_a_run_without_a_folder_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_in(tmp_path)
    job = Trainer.of(settings).job
    summary = Trainer(job, None, standard(settings)).train()
    assert summary["steps"] == 20 and not list(tmp_path.iterdir())


def test_the_probe_is_one_of_the_callbacks_only_where_it_is_asked_for(tmp_path: Path) -> None:
    (only,) = standard(settings_in(tmp_path, "probe.every=0"))
    assert isinstance(only, Figures) and len(standard(settings_in(tmp_path))) == 2


def test_labels_of_near_points_do_not_cover_each_other() -> None:
    fig, ax = plt.subplots()
    crowd = [((1 + k / 1000, 1.0), f"label {k}") for k in range(12)]
    ax.plot([0, 2], [0, 2])
    left_out = label_points(ax, [((0.0, 0.0), "alone"), *crowd])
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == 13 - left_out and 0 < left_out < 12
    assert ax.texts[0].get_text() == "alone" and ax.texts[1].get_text() == "label 0"
    pairs = itertools.combinations(boxes, 2)
    assert not any(a.overlaps(b) for a, b in pairs)
    plt.close(fig)
