"""Reports: from run folders to tables, and from the stored rows alone to the same tables."""

import json
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from conftest import Result

from treeprop_ray import config
from treeprop_ray.config.spaces import shipped
from treeprop_ray.errors import UserError
from treeprop_ray.reporting import index
from treeprop_ray.reporting.plot import plt
from treeprop_ray.sweep import rows, table
from treeprop_ray.sweep.command import sweep_of_command
from treeprop_ray.sweep.parsing import load_space
from treeprop_ray.sweep.plan import Sweep, Trial

Command = Callable[..., Result]
RESULTS = Path(__file__).parent.parent.parent / "results"

SWEEP = """
title: A small sweep
base: digits
bases: {digits: {settings: {epochs: 2, model.activation: tanh}}}
space: {alpha: [0, 1], beta: [0, 0.5]}
exclude: [{alpha: 0, beta: 0}]
seeds: [1, 2]
table: {rows: [alpha], columns: [beta], values: {accuracy: test/full/accuracy}}
figure: {kind: heatmap, x: beta, y: alpha}
paper:
  - {about: another network, base: cifar10_vit, cells: {0: {0.5: 13.38 ± 0.18}, 1: {0.5: 88.5}}}
"""

REPORT = """\
# A small sweep

## 2 epochs, base digits

| alpha | beta=0               | beta=0.5     | paper, beta=0.5 |
|-------|----------------------|--------------|-----------------|
| 0     | -                    | 11.00 ± 1.41 | 13.38 ± 0.18    |
| 1     | 90.00 (1 of 2 seeds) | not run      | 88.5            |

test accuracy (%) of full; mean ± sample standard deviation over seeds 1, 2. 3 of 6 runs.  
Paper: another network. Other data and network than ours: compare the pattern.  
best: alpha=1 beta=0, validation accuracy (%) of full 90.00 (1 of 2 seeds), `python -m treeprop_ray.train experiment=digits epochs=2 model.activation=tanh alpha=1 beta=0 seed=1`  
Settings besides the base's: `epochs=2` `model.activation=tanh`.  
Data: digits. Training time of all runs together 0:06.  
Commit abc, 2026-01-02 03:04 UTC, 2 cores, a CPU, torch 1, ray 2.  
Command: `python -m treeprop_ray.tune sweep={sweep}`  

![A small sweep](small.png)

Every run with its command, commit and figures: [small.csv](small.csv).
"""  # noqa: E501


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SWEEP)
    return path


def sweep_at(path: Path, *words: str) -> Sweep:
    command = " ".join(["python -m treeprop_ray.tune", f"sweep={path}", *words])
    return sweep_of_command(command, str(path.parent / "runs"))


def finish(trial: Trial, accuracy: float, **more: Any) -> None:
    """A run folder as `train` leaves it, with made-up figures."""
    trial.folder.mkdir(parents=True)
    (trial.folder / "config.yaml").write_text(config.to_yaml(trial.settings))
    score = {"loss": 0.5, "accuracy": accuracy}
    summary = {
        "final": {"validation": {"full": score}, "test": {"full": score}},
        "leak": 0.0, "parameters_deployed": 10, "epochs": float(trial.settings.epochs),
        "wall_seconds": 2.0, "commit": "abc", "date": "2026-01-02T03:04:05+00:00",
        "hardware": {"cores": 2, "cpu": "a CPU", "gpus": []},
        "versions": {"torch": "1", "ray": "2"}, **more,
    }  # fmt: skip
    (trial.folder / "summary.json").write_text(json.dumps(summary))


def pick(sweep: Sweep, alpha: float, beta: float, seed: int) -> Trial:
    wanted = ({"alpha": alpha, "beta": beta}, seed)
    return next(t for t in sweep.trials() if (t.point, t.seed) == wanted)


def made_up_runs(small: Path) -> Sweep:
    sweep = sweep_at(small)
    finish(pick(sweep, 0, 0.5, 1), 0.10)
    finish(pick(sweep, 0, 0.5, 2), 0.12)
    finish(pick(sweep, 1, 0, 1), 0.90)
    rows.log_command(sweep.folder, sweep.command)
    return sweep


def report(command: Command, small: Path) -> str:
    out = small.parent / "out"
    words = [f"storage={small.parent / 'runs'}", f"out={out}", "sweep=small"]
    result = command("report", *words)
    assert result.code == 0, result.err
    return (out / "small.md").read_text()


def test_the_report_of_fixed_runs_is_exactly_this_table(command: Command, small: Path) -> None:
    made_up_runs(small)
    assert report(command, small) == REPORT.replace("{sweep}", str(small))
    assert (small.parent / "out" / "small.png").stat().st_size > 1000
    readme = (small.parent / "out" / "README.md").read_text()
    assert "| [small](small.md) | A small sweep | 3 | `python -m treeprop_ray.tune" in readme
    assert "| alpha_beta |" in readme and "| not run |" in readme


def test_the_deepest_path_and_costs_in_table_and_figure(command: Command, small: Path) -> None:
    values = "{path: test/spine/accuracy, span: critical_path, work: work, layers: spine_layers}"
    text = SWEEP.replace("{accuracy: test/full/accuracy}", values)
    scatter = "{kind: scatter, x: critical_path, y: test/spine/accuracy}"
    small.write_text(text.replace("{kind: heatmap, x: beta, y: alpha}", scatter))
    sweep = sweep_at(small)
    scores = {f"spine-{k}": {"loss": 1.0, "accuracy": k / 100} for k in (2, 9, 10)}
    cost = {"work": 20.0, "critical_path": 12.5}
    finish(pick(sweep, 1, 0, 1), 0.9, final={"validation": scores, "test": scores}, cost=cost)
    rows.log_command(sweep.folder, sweep.command)
    line = next(line for line in report(command, small).splitlines() if line.startswith("| 1 "))
    assert "10.00 (1 of 2 seeds)" in line and "12.5 (1 of 2" in line and " 20 (1 of 2" in line
    assert "| 3 (1 of 2" in line  # the tree of seven blocks ends in a path of three
    assert (small.parent / "out" / "small.png").stat().st_size > 1000
    small.write_text(text.replace("{kind: heatmap, x: beta, y: alpha}", "{kind: scatter, x: work}"))
    with pytest.raises(UserError, match="two metrics"):
        load_space(str(small))


def test_the_csv_alone_gives_the_same_table(command: Command, small: Path) -> None:
    sweep = made_up_runs(small)
    first = report(command, small)
    stored = (small.parent / "out" / "small.csv").read_text()
    shutil.rmtree(sweep.folder)
    assert report(command, small) == first
    assert (small.parent / "out" / "small.csv").read_text() == stored


def test_runs_with_different_epochs_never_share_a_cell(command: Command, small: Path) -> None:
    made_up_runs(small)
    longer = sweep_at(small, "epochs=5", "seeds=[2]")
    finish(pick(longer, 1, 0, 2), 0.99)  # would complete the cell of the shorter runs
    rows.log_command(longer.folder, longer.command)
    short, _, long = report(command, small).partition("## 5 epochs")
    assert "90.00 (1 of 2 seeds)" in short and "99.00" not in short
    assert "99.00" in long and "90.00" not in long


def test_a_table_whose_cells_have_different_seeds_says_so(command: Command, small: Path) -> None:
    for sweep in (sweep_at(small, "seeds=[1]"), sweep_at(small, "seeds=[1,2]", "alpha=[1]")):
        for trial in sweep.trials():
            if not trial.folder.exists():
                finish(trial, 0.9)
        rows.log_command(sweep.folder, sweep.command)
    kinds = "one run, seed 1, or mean ± sample standard deviation over seeds 1, 2. 5 of 5 runs."
    assert kinds in report(command, small)


def test_a_heading_names_what_the_command_set(command: Command, small: Path) -> None:
    sweep = sweep_at(small, "lr=0.01", "model.activation=tanh", "seeds=[1]")
    finish(pick(sweep, 1, 0, 1), 0.9)
    rows.log_command(sweep.folder, sweep.command)
    assert "## 2 epochs, base digits, lr=0.01\n" in report(command, small)


def test_a_figure_that_no_run_has_makes_no_column(command: Command, small: Path) -> None:
    values = "values: {accuracy: test/full/accuracy, late: late/full/accuracy}"
    text = small.read_text().replace("values: {accuracy: test/full/accuracy}", values)
    small.write_text(text.replace("columns: [beta]", "columns: [beta, value]"))
    made_up_runs(small)
    found = report(command, small)
    assert "beta=0, accuracy" in found and "beta=0.5, accuracy" in found
    assert "beta=0.5, late" not in found, "one setting without the figure, one not run"


def test_a_failed_run_shows_its_error_and_no_figure(command: Command, small: Path) -> None:
    sweep = made_up_runs(small)
    failed = pick(sweep, 1, 0.5, 1)
    failed.error_file.parent.mkdir()
    failed.error_file.write_text("node 3: the loss is not finite")
    text = report(command, small)
    assert "| failed " in text and "the loss is not finite" in text


def test_a_table_without_runs_is_an_error(command: Command, tmp_path: Path) -> None:
    result = command("report", "sweep=alpha_beta", f"storage={tmp_path}", f"out={tmp_path}")
    assert result.code == 2 and "no run has come to an end" in result.err
    assert not list(tmp_path.iterdir())


SEARCH = """
base: digits
bases: {digits: {settings: {epochs: 2}}}
space: {lr: {loguniform: [0.001, 0.1]}, model.hidden: {randint: [8, 64]}, optimizer: [sgd, adamw]}
"""


def test_a_search_is_a_list_with_the_best_first_and_a_panel_for_each_axis(
    command: Command, small: Path
) -> None:
    small.write_text(SEARCH)
    sweep = sweep_at(small, "search=random", "samples=5")
    trials = list(sweep.trials())
    for trial, accuracy in zip(trials[:3], (0.5, 0.9, 0.7), strict=True):
        finish(trial, accuracy)
    trials[3].folder.mkdir()
    (trials[3].folder / "config.yaml").write_text(config.to_yaml(trials[3].settings))
    (trials[3].folder / "stopped.json").write_text(json.dumps({"epoch": 1, "score": 0.3}))
    rows.log_command(sweep.folder, sweep.command)
    page = report(command, small)
    lines = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    heading, _, *shown = [[cell.strip() for cell in line] for line in lines]
    assert heading == ["#", "lr", "hidden", "optimizer", "validation", "test/full/accuracy"]
    assert [line[-2] for line in shown] == [
        "90.00", "70.00", "50.00", "stopped at epoch 1, validation 30.00", "not run",
    ]  # fmt: skip
    best = trials[1].point
    assert shown[0][1:4] == [f"{best['lr']:.4g}", str(best["model.hidden"]), best["optimizer"]]
    assert f"best: lr={best['lr']:.4g} model.hidden=" in page and trials[1].command in page
    assert "1 of 4 runs were stopped by the scheduler." in page and "![" in page
    width = plt.imread(small.parent / "out" / "small.png").shape[1]
    assert width > 3 * 300, "three axes side by side"
    small.write_text(SEARCH + "figure: {kind: panels, x: lr}\n")
    with pytest.raises(UserError, match="panels are for all axes"):
        load_space(str(small))


STORED = index.sweep_tables(RESULTS)


@pytest.mark.parametrize("name", STORED)
def test_committed_tables_follow_from_the_committed_rows(name: str) -> None:
    stored = rows.read_rows(RESULTS / f"{name}.csv")
    made = table.sections(stored, sweep_of_command)
    assert table.report_of(name, made) == (RESULTS / f"{name}.md").read_text()
    for row in stored:
        assert {"command", "sweep_command", "epochs", "seed"} <= row.keys()
        assert row["status"] != "finished" or {"commit", "wall_seconds", "date"} <= row.keys()


@pytest.mark.parametrize("name", STORED)
def test_committed_commands_still_mean_the_runs_beside_them(name: str) -> None:
    for command, group in groupby(
        rows.read_rows(RESULTS / f"{name}.csv"), lambda row: row["sweep_command"]
    ):
        sweep = sweep_of_command(command)
        meant = {f"{sweep.name}/{trial.settings.name}" for trial in sweep.trials()}
        assert {row["run"] for row in group} <= meant, command


def test_every_shipped_sweep_with_figures_of_the_paper_has_a_place_in_the_index() -> None:
    answered = [name for item in index.paper_items(RESULTS) for name in item.pages]
    for name in shipped():
        if load_space(name).paper:
            assert f"{name}*" in answered, name


def test_the_index_shows_our_table_beside_the_papers_figures(tmp_path: Path) -> None:
    for kind in ("md", "csv"):
        shutil.copy(RESULTS / f"alpha_beta.{kind}", tmp_path)
    text = index.index_of(tmp_path)
    section = text.partition("### Table: alpha and beta")[2].partition("\n### ")[0]
    assert "| paper, beta=0 " in section and "13.38 ± 0.18" in section
    assert "Command: `python -m treeprop_ray.tune sweep=alpha_beta`" in section
    other = text.partition("### Table: objective by path")[2].partition("\n### ")[0]
    assert "Not run here." in other and "make reproduce TABLE=objective" in other


def test_the_committed_index_is_up_to_date() -> None:
    stored = (RESULTS / "README.md").read_text()
    assert index.index_of(RESULTS) == stored, "`treeprop report --record` writes it anew"
