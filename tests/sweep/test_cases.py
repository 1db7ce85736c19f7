"""Cases of a sweep: settings that go with some points and stand in one table with the others."""

from pathlib import Path

import pytest

from treeprop_ray.errors import UserError
from treeprop_ray.sweep import rows, table
from treeprop_ray.sweep.parsing import load_space
from treeprop_ray.sweep.plan import Sweep, resolve

SPACE = """
base: digits
bases:
  digits:
    settings: {epochs: 2, lr: 0.01}
    cases:
      - {where: {method: bp}, settings: {lr: 0.5, epochs: 9}}
      - {where: {model.hidden: [8, 16]}, settings: {clip: 1}}
  mnist_d2: {space: [{method: [tree], model.hidden: [8]}, {method: [bp], model.hidden: [16]}]}
space: {method: [tree, bp], model.hidden: [8, 32]}
paper:
  - {about: first, base: cifar10_vit, cells: {}}
  - {about: second, base: cifar100_vit, cells: {}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cased.yaml"
    path.write_text(SPACE)
    return path


def sweep_at(file: Path, *words: str, base: str = "") -> Sweep:
    return resolve(str(file), base, words, None, str(file.parent / "runs"), "a command")


def settings_of(sweep: Sweep) -> dict[tuple[str, int], tuple[float, int, float]]:
    every = [trial.settings for trial in sweep.trials()]
    return {(s.method, s.model.hidden): (s.lr, s.epochs, s.clip) for s in every}


def test_a_case_sets_what_its_points_need_and_nothing_else(file: Path) -> None:
    sweep = sweep_at(file)
    assert settings_of(sweep) == {
        ("tree", 8): (0.01, 2, 1),
        ("tree", 32): (0.01, 2, 0),
        ("bp", 8): (0.5, 9, 1),
        ("bp", 32): (0.5, 9, 0),
    }
    assert sweep.epochs == 9
    command = sweep.trial({"method": "bp", "model.hidden": 8}, 1).command
    assert " epochs=9 lr=0.5 clip=1 method=bp " in command


def test_what_the_user_gives_is_for_all_points(file: Path) -> None:
    sweep = sweep_at(file, "lr=0.2", "epochs=1")
    assert set(settings_of(sweep).values()) == {(0.2, 1, 1), (0.2, 1, 0)}
    assert sweep.case_keys == ["clip"] and sweep.epochs == 1


def test_points_share_a_table_unless_a_case_or_its_base_changes(file: Path) -> None:
    """Else runs of different settings would be put into one cell."""

    def protocol(*words: str) -> str:
        (only,) = {trial.protocol for trial in sweep_at(file, *words).trials()}
        return only

    before = {protocol(), protocol("lr=0.2"), protocol("weight_decay=0.5")}
    file.write_text(SPACE.replace("lr: 0.5", "lr: 0.6"))
    before.add(protocol())
    file.write_text(SPACE.replace("lr: 0.01", "lr: 0.02"))
    before.add(protocol())
    assert len(before) == 5


def test_a_base_may_have_grids_of_its_own(file: Path) -> None:
    points = sweep_at(file, base="mnist_d2").all_points()
    assert points == [{"method": "tree", "model.hidden": 8}, {"method": "bp", "model.hidden": 16}]


def test_the_page_says_which_settings_are_whose(file: Path) -> None:
    sweep = sweep_at(file)
    made = []
    for trial in sweep.trials():
        row = {"run": trial.settings.name, "status": "finished", "seed": "1", "epochs": "2"}
        axes = {key: str(value) for key, value in trial.point.items()}
        made.append({**row, **axes, "protocol": trial.protocol, "command": trial.command,
                     "sweep_command": "c", "wall_seconds": "1", "date": "2026-01-02T03:04",
                     "commit": "abc", "cores": "1", "cpu": "C", "torch": "1", "ray": "2",
                     "data": "digits", "test/full/accuracy": "0.5"})  # fmt: skip
    (section,) = table.sections(made, lambda command: sweep)
    page = table.report_of("cased", [section])
    assert (
        "base's: `epochs=2` `lr=0.01`; method=bp: `lr=0.5` `epochs=9`; "
        "model.hidden=8 or 16: `clip=1`." in page
    )
    assert rows.value_of("test/full/accuracy", made[0]) == 0.5


@pytest.mark.parametrize(
    ("base", "about"),
    [("digits", "first"), ("cifar100_vit", "second"), ("cifar100_vit_small", "second")],
)
def test_a_small_twin_is_compared_with_the_large_one(file: Path, base: str, about: str) -> None:
    paper = table.paper_of(table.Section(sweep_at(file, base=base), [], [], []))
    assert paper is not None and paper.about == about


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("where: {method", "where: {clip", "clip is no axis"),
        ("where: {method: bp}", "where: {method: {uniform: [0, 1]}}", "a value, or a list"),
        ("lr: 0.5, epochs: 9", "rate: 1", "rate is no setting"),
        ("lr: 0.5, epochs: 9", "method: tree", "method is an axis"),
        ("{lr: 0.5, epochs: 9}", "{}", "must hold key: value lines"),
        ("where: {method: bp}, ", "", "must hold key: [values] lines"),
        ("settings: {clip", "setting: {clip", "did you mean settings?"),
        ("{method: [tree], model.hidden: [8]}", "{method: [tree]}", "all grids need the same keys"),
    ],
)
def test_a_mistake_in_a_case_is_one_line(file: Path, old: str, new: str, part: str) -> None:
    assert old in SPACE
    file.write_text(SPACE.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_space(str(file))
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("metric: validation/full/acc", "metric=validation/full/acc: must be <validation|test"),
        ("metric: valid/full/loss", "metric=valid/full/loss: must be"),
        ("metric: lead", "metric=lead: .*one of leak, correction_ratio"),
        ("table: {values: {mine: test/loss}}", "table.values.mine=test/loss: must be"),
    ],
)
def test_a_metric_that_no_run_has_is_one_line(file: Path, words: str, says: str) -> None:
    file.write_text(f"{SPACE}{words}\n")
    with pytest.raises(UserError, match=says.replace("|", r"\|")):
        load_space(str(file))


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("", "max"),
        ("metric: validation/full/loss", "min"),
        ("metric: test/spine-1/perplexity", "min"),
        ("metric: parameters_deployed", "min"),
        ("metric: validation/full/accuracy", "max"),
        ("metric: validation/full/loss\nmode: max", "max"),
    ],
)
def test_the_best_loss_is_the_lowest(file: Path, words: str, mode: str) -> None:
    file.write_text(f"{SPACE}{words}\n")
    assert load_space(str(file)).mode == mode
