"""Sweeps: spaces and their trials, resources, and Ray Tune running, failing and resuming."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import Result
from ray.tune.search import Searcher
from rich.console import Console

from treeprop_ray import config
from treeprop_ray.config import RaySettings
from treeprop_ray.config.spaces import shipped
from treeprop_ray.engine import runtime
from treeprop_ray.engine.watch import reached
from treeprop_ray.errors import UserError
from treeprop_ray.schedule.cluster import Cluster
from treeprop_ray.sweep.parsing import load_space
from treeprop_ray.sweep.plan import resolve
from treeprop_ray.sweep.resources import need, pin, side_by_side
from treeprop_ray.sweep.rows import read_rows
from treeprop_ray.sweep.search import draw_points, optuna_search
from treeprop_ray.sweep.space import grid_points
from treeprop_ray.sweep.view import View

Command = Callable[..., Result]

COUNTS = {  # settings x seeds
    "alpha_beta": 8 * 3,
    "cifar_grid": 3 * 2 * 2 + 3 * 2,
    "consistency_weight": 2 * 3 * 3,
    "correction": 11 * 3,
    "literal": 12,
    "gap_study": 18,
    "gap_text": 13 * 3,
    "gap_vit": 6 * 3,
    "k_sweep": 3 * 4 * 3,
    "lm_grid": 2 * 3,
    "lm_study": 9,
    "lm_table": 6 * 3,
    "mnist_grid": 2 * 2 * 3 * 2,
    "mnist_study": 24,
    "mnist_table": 3 * 3 * 3 * 3,
    "noise_scale": 7 * 2 * 3,
    "classification": 7 * 3,
    "objective": 3 * 3,
    "split_rule": 3 * 2 * 3,
    "tt_depth": 8 * 3 + 7 * 2,
    "tt_newton": 50,
    "tt_mnist": 32,
    "vit_study": 14,
}
TINY = """
title: tiny
base: digits
bases: {digits: {settings: {model.blocks: 2, model.hidden: 8, model.activation: relu,
  optimizer: sgd, epochs: 2, log_every: 100, checkpoint_every: 1000}}}
space: {lr: [0.01, 0.02]}
seeds: [1]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[str]:
    """A Ray with two CPUs that all sweeps of this file use."""
    runtime.start(RaySettings(num_cpus=2))
    yield ray.get_runtime_context().gcs_address
    runtime.stop()


def folders(path: Path) -> list[str]:
    return [f"storage={path.parent / 'runs'}", f"out={path.parent / 'out'}"]


# -- spaces ------------------------------------------------------------------------------------


def test_every_shipped_space_is_counted_here() -> None:
    assert shipped() == sorted(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_a_shipped_space_expands_to_valid_trials(name: str, tmp_path: Path) -> None:
    sweep = resolve(name, "", [], None, str(tmp_path))
    trials = list(sweep.trials())
    assert len(trials) == COUNTS[name] == len({t.settings.name for t in trials})
    assert len({t.protocol for t in trials}) == 1
    for trial in (trials[0], trials[-1]):
        alone = config.load(shlex.split(trial.command)[3:])
        assert not config.differences(alone, trial.settings)
        assert alone.epochs == trial.settings.epochs
    layout = sweep.space.table
    assert {*layout.rows, *layout.columns} == {*sweep.space.axes, "value"}


def test_a_sweep_has_one_folder_wherever_its_workers_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a Ray that was started elsewhere has another working folder."""
    monkeypatch.chdir(tiny.parent)
    sweep = resolve(str(tiny), "", [], None, "runs")
    monkeypatch.chdir("/")
    assert sweep.folder == tiny.parent / "runs" / "tiny"
    assert {trial.folder.parent for trial in sweep.trials()} == {sweep.folder}


def test_the_order_of_keys_in_a_grid_changes_no_name(tmp_path: Path) -> None:
    """Tune's worker builds a trial from the axes; the plan builds it from the grid."""
    path = tmp_path / "two.yaml"
    path.write_text("base: digits\nspace: [{lr: [1], clip: [1]}, {clip: [2], lr: [2]}]\n")
    sweep = resolve(str(path), "", [], None, str(tmp_path))
    for trial in sweep.trials():
        again = sweep.trial({k: trial.point[k] for k in sweep.space.axes}, trial.seed)
        assert again.settings.name == trial.settings.name


@pytest.mark.parametrize("name", COUNTS)
def test_the_bases_a_space_names_exist_and_fit_it(name: str, tmp_path: Path) -> None:
    space = load_space(name)
    for base in {*space.bases, *(p.base for p in space.paper if p.base)}:
        sweep = resolve(name, base, [], None, str(tmp_path))
        assert sweep.name == (name if base == space.base else f"{name}-{base}")
        assert sweep.trial(sweep.all_points()[0], 1).settings.experiment == base
        if sweep.cases:  # settings of some points: all in one table nevertheless
            assert len({sweep.trial(point, 1).protocol for point in sweep.all_points()}) == 1


@pytest.mark.parametrize("name", COUNTS)
def test_alpha_and_beta_are_never_both_zero(name: str) -> None:
    for point in grid_points(load_space(name)):
        assert not (point.get("alpha") == 0 and point.get("beta") == 0)


def test_the_papers_figures_belong_to_cells_of_the_table() -> None:
    for name in shipped():
        space = load_space(name)
        table = space.table
        full = [*table.rows, *table.columns]
        bare = [key for key in full if key != "value"]  # a figure for all values of the table
        for paper in space.paper:
            for keys, value in leaves(paper.cells):
                assert len(keys) == len(bare) or len(table.values) > 1, (name, keys)
                axes = bare if len(keys) == len(bare) else full
                for axis, key in zip(axes, keys, strict=True):
                    assert axis != "value" or key in table.values, (name, keys)
                assert paper.cell(keys) == str(value)


def leaves(
    tree: object, above: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], object]]:
    if isinstance(tree, dict):
        for key, below in tree.items():
            yield from leaves(below, (*above, key))
    else:
        yield above, tree


def test_a_key_of_the_space_takes_new_values() -> None:
    sweep = resolve("noise_scale", "", ["sigma=[0,0.1]", "epochs=3"], [7], "runs")
    trials = list(sweep.trials())
    assert {t.settings.sigma for t in trials} == {0, 0.1} and len(trials) == 4
    assert all(t.settings.epochs == 3 and t.settings.seed == 7 for t in trials)


def test_grids_of_a_union_keep_their_own_values() -> None:
    words = ["method=[tree]", "time.depth=[2,3]"]
    points = resolve("tt_depth", "", words, None, "runs").all_points()
    assert len(points) == 2 * 2 + 2 and {p["method"] for p in points} == {"tree"}
    with pytest.raises(UserError, match="some of tree, bptt"):
        resolve("tt_depth", "", ["method=[bp]"], None, "runs")


def test_random_draws_are_the_same_every_time_and_respect_exclusions(tiny: Path) -> None:
    space = load_space("alpha_beta")
    assert draw_points(space, 5) == draw_points(space, 5) and len(draw_points(space, 50)) == 8
    tiny.write_text(TINY.replace("[0.01, 0.02]", "{loguniform: [0.001, 0.1]}"))
    drawn = draw_points(load_space(str(tiny)), 6)
    assert len({p["lr"] for p in drawn}) == 6 and all(0.001 <= p["lr"] <= 0.1 for p in drawn)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["sweep=", "alpha_beta"]),
        (["sweep=alfa"], ["sweep=alfa", "alpha_beta"]),
        (["sweep=alpha_beta", "base=nothing"], ["base=nothing", "digits"]),
        (["sweep=alpha_beta", "seed=3"], ["seed=3", "seeds="]),
        (["sweep=alpha_beta", "seeds=[1,1]"], ["seeds=[1, 1]"]),
        (["sweep=alpha_beta", "alpha=[0.5,0.5]"], ["alpha=[0.5, 0.5]"]),
        (["sweep=alpha_beta", "alpha=[3]"], ["alpha=3", "at most 1"]),
        (["sweep=alpha_beta", "epoch=3"], ["epoch", "epochs"]),
        (["sweep=alpha_beta", "search=wild"], ["search=wild", "optuna"]),
        (["sweep=alpha_beta", "storage=s3://bucket"], ["storage=s3://bucket"]),
        (["sweep=alpha_beta", "model.activation=sigmoid"], ["alpha + beta = 1"]),
    ],
)
def test_mistakes_end_with_one_line_and_nothing_written(
    command: Command, tmp_path: Path, words: list[str], names: list[str]
) -> None:
    result = command("tune", f"storage={tmp_path}", f"out={tmp_path}", *words)
    assert result.code == 2 and len(result.error_lines) == 1
    assert all(name in result.err for name in names), result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_missing_tracker_says_what_to_install(command: Command, tiny: Path, tracker: str) -> None:
    if importlib.util.find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    result = command("tune", f"sweep={tiny}", *folders(tiny), f"{tracker}=here")
    assert result.code == 2 and f"`pip install {tracker}`" in result.err
    assert not (tiny.parent / "runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("space:", "spase:", ["spase", "did you mean space"]),
        ("{lr:", "{rate:", ["rate", "no setting of train"]),
        ("[0.01, 0.02]", "{loguniform: [0.001, 0.1]}", ["range", "search=random"]),
        ("seeds: [1]", "seeds: one", ["seeds=one"]),
        ("seeds: [1]", "table: {rows: [beta]}", ["beta is no axis"]),
    ],
)
def test_mistakes_in_an_own_sweep_name_the_key(
    command: Command, tiny: Path, old: str, new: str, names: list[str]
) -> None:
    tiny.write_text(TINY.replace(old, new))
    result = command("tune", f"sweep={tiny}", *folders(tiny))
    assert result.code == 2 and len(result.error_lines) == 1
    assert all(name in result.err for name in names), result.err


# -- resources ----------------------------------------------------------------------------------


def test_a_trial_on_ray_asks_for_the_bundles_of_its_tree() -> None:
    cluster = Cluster(((4.0, 0.0),))
    words = ["engine=ray", "placement=per_node", "cpus_per_actor=0.25", "model.blocks=3"]
    each = need(config.load(words), cluster)
    assert each.bundles == [{}, *[{"CPU": 0.25}] * 4] and each.total("CPU") == 1
    time_words = ["experiment=digits_gru", "engine=ray", "cpus_per_actor=0.5"]
    assert need(config.load(time_words), cluster).bundles == [{}, *[{"CPU": 0.5}] * 5]
    pinned = pin(config.load(["engine=ray", "model.blocks=3"]), cluster)
    assert (pinned.placement, pinned.hosts, pinned.cpus_per_actor) == ("per_node", 0, 1.0)
    assert need(config.load([]), Cluster(((4.0, 2.0),))).bundles == [{"CPU": 1.0, "GPU": 1.0}]


def test_bundles_that_can_never_fit_are_an_error(command: Command, tiny: Path) -> None:
    cluster = Cluster(((2.0, 0.0),))
    with pytest.raises(UserError, match="cannot fit"):
        need(config.load(["engine=ray", "placement=per_node", "cpus_per_actor=1"]), cluster)
    with pytest.raises(UserError, match="threads=8"):
        need(config.load(["threads=8"]), cluster)
    with pytest.raises(UserError, match="engine=train"):
        need(config.load(["engine=train", "method=bp"]), cluster)
    words = [f"sweep={tiny}", *folders(tiny), "ray.num_cpus=2", "threads=8"]
    result = command("tune", *words, "--dry-run")
    assert result.code == 2 and "threads=8" in result.err


def test_the_dry_run_lists_trials_resources_and_commands(command: Command, tiny: Path) -> None:
    result = command("tune", f"sweep={tiny}", *folders(tiny), "ray.num_cpus=2", "--dry-run")
    assert result.code == 0 and result.out.count("python -m treeprop_ray.train") == 2
    for text in ("1 CPU", "lr=0.02 seed=1", "2 trials, 0 done; 2 at a time", "after the first"):
        assert text in result.out
    assert not (tiny.parent / "runs").exists()
    trials = list(resolve(str(tiny), "", [], None, "runs").trials())
    assert side_by_side(trials, Cluster(((8.0, 0.0),)), 3) == 3


def test_the_view_shows_trials_epochs_and_time_left(tiny: Path) -> None:
    a, b = resolve(str(tiny), "", [], None, "runs").trials()
    console = Console(force_terminal=True, width=100, record=True, file=StringIO())
    view = View("tiny", 2, 0, "test/full/accuracy", console)
    view.start(a)
    view.result(a, 1, 0.5)
    console.print(view.table())
    view.failed(a, "the loss is not finite")
    view.start(b)
    text = console.export_text()
    for part in ("lr=0.01 seed=1", "1/2", "50.00", "ETA", "[1/2]", "failed: the loss", b.command):
        assert part in text


# -- Ray Tune ------------------------------------------------------------------------------------


def test_a_failing_trial_does_not_sink_the_sweep_and_commands_repeat_trials(
    two_cpus: str, command: Command, tiny: Path
) -> None:
    result = command("tune", f"sweep={tiny}", *folders(tiny), "lr=[0.02,1e15]")
    assert result.code == 1 and "1 trials failed" in result.err
    assert "failed: loss own=nan at node" in result.out
    report = (tiny.parent / "out" / "tiny.md").read_text()
    assert "| failed " in report and "1 of 2 runs" in report

    (summary,) = (tiny.parent / "runs" / "tiny").glob("*/summary.json")
    whole = json.loads(summary.read_text())
    assert whole["command"] in result.out and "lr=0.02" in whole["command"]
    words = shlex.split(whole["command"])[3:]
    assert command("train", *words, f"out={tiny.parent}", "name=alone").code == 0
    alone = json.loads((tiny.parent / "alone" / "summary.json").read_text())
    assert alone["final"] == whole["final"] and alone["leak"] == whole["leak"]


def test_after_kill_9_the_same_command_repeats_nothing(
    two_cpus: str, command: Command, tiny: Path
) -> None:
    words = [f"sweep={tiny}", *folders(tiny), "seeds=[1,2]", "max_concurrent=1", "epochs=6"]
    first = subprocess.Popen(
        [sys.executable, "-m", "treeprop_ray.tune", *words, f"ray.address={two_cpus}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    runs = tiny.parent / "runs" / "tiny"
    wait_until(lambda: any(runs.glob("*/summary.json")), first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = {p: p.stat().st_mtime_ns for p in runs.glob("*/summary.json")}
    assert 1 <= len(before) < 4  # killed in the middle
    result = command("tune", *words)
    assert result.code == 0, result.err
    assert result.out.count("start ") == 4 - len(before)
    assert len(list(runs.glob("*/summary.json"))) == 4
    assert {p: p.stat().st_mtime_ns for p in before} == before
    again = command("tune", *words)
    assert again.code == 0 and "all 4 trials are finished" in again.out


def test_after_the_head_is_lost_the_same_command_continues(
    two_cpus: str, command: Command, tiny: Path
) -> None:
    """A head of its own, on loopback and in a folder of its own, ends in the middle of a sweep."""
    place = tempfile.mkdtemp(prefix="hd", dir="/tmp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = [
        Path(sys.executable).parent / "ray", "start", "--head", "--block", f"--port={port}",
        "--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={place}",
        "--num-cpus=1", "--disable-usage-stats",
    ]  # fmt: skip
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    head = subprocess.Popen(start, start_new_session=True, **nowhere)  # type: ignore[call-overload]
    words = [f"sweep={tiny}", *folders(tiny), "epochs=6", "seeds=[1,2]"]
    runs = tiny.parent / "runs" / "tiny"
    try:
        wait_until(lambda: reached(f"127.0.0.1:{port}"), head)
        first = subprocess.Popen(
            [sys.executable, "-m", "treeprop_ray.tune", *words, f"ray.address=127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_until(lambda: any(runs.glob("*/summary.json")), first)
    finally:
        os.killpg(head.pid, signal.SIGKILL)  # with all that it has started
        head.wait()
        shutil.rmtree(place, ignore_errors=True)
    _, err = first.communicate()
    *_, last = err.strip().splitlines()
    assert first.returncode == 1 and last.startswith("failed: Ray")
    assert "no finished trial is lost; this continues: python -m treeprop_ray.tune" in last
    before = {p: p.stat().st_mtime_ns for p in runs.glob("*/summary.json")}
    result = command("tune", *words)
    assert result.code == 0, result.err
    assert result.out.count("start ") == 4 - len(before) > 0
    assert {p: p.stat().st_mtime_ns for p in before} == before


def wait_until(there: Callable[[], bool], process: "subprocess.Popen[Any]") -> None:
    deadline = time.monotonic() + 900
    while not there():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_the_actors_of_a_trial_live_in_its_own_bundles(
    two_cpus: str, command: Command, tiny: Path
) -> None:
    """Both CPUs belong to the trial, so a second placement group would never be free."""
    words = ["engine=ray", "placement=packed", "hosts=2", "cpus_per_actor=1", "lr=[0.02]"]
    result = command("tune", f"sweep={tiny}", *folders(tiny), *words)
    assert result.code == 0, result.err
    (summary,) = (tiny.parent / "runs" / "tiny").glob("*/summary.json")
    assert json.loads(summary.read_text())["engine"] == "ray"


def test_optuna_goes_on_from_the_finished_trials(
    two_cpus: str, command: Command, tiny: Path
) -> None:
    tiny.write_text(TINY.replace("[0.01, 0.02]", "{loguniform: [0.0001, 0.1]}"))
    words = [f"sweep={tiny}", *folders(tiny), "search=optuna", "epochs=1"]
    assert command("tune", *words, "samples=1").code == 0
    more = command("tune", *words, "samples=2")
    assert more.code == 0 and more.out.count("start ") == 1
    stored = read_rows(tiny.parent / "out" / "tiny.csv")
    assert len({r["lr"] for r in stored}) == 2 and {r["status"] for r in stored} == {"finished"}


def test_asha_ends_a_weak_trial_for_good(two_cpus: str, command: Command, tiny: Path) -> None:
    words = [f"sweep={tiny}", *folders(tiny), "scheduler=asha", "epochs=9", "max_concurrent=1"]
    assert command("tune", *words, "lr=[0.1,1e-6]").code == 0
    stored = read_rows(tiny.parent / "out" / "tiny.csv")
    assert [(r["status"], r["epochs"]) for r in stored] == [("finished", "9"), ("stopped", "1")]
    (left,) = (tiny.parent / "runs" / "tiny").glob("*/stopped.json")
    stopped = json.loads(left.read_text())
    assert stopped["epoch"] == 1 and 0 <= stopped["score"] <= 1 and "1e-06" in left.parent.name
    shown = f"stopped at epoch 1, validation {100 * stopped['score']:.2f}"
    page = (tiny.parent / "out" / "tiny.md").read_text()
    assert shown in page and "1 of 2 runs were stopped by the scheduler." in page
    assert not (left.parent / "summary.json").exists()
    assert "all 2 trials are finished" in command("tune", *words, "lr=[0.1,1e-6]").out


def test_optuna_with_asha_trains_good_trials_to_the_end_and_repeats_no_setting(
    two_cpus: str, command: Command, tiny: Path
) -> None:
    """Two values and many samples: a proposal that was made before has its run already."""
    words = [f"sweep={tiny}", *folders(tiny), "search=optuna", "samples=9", "scheduler=asha"]
    result = command("tune", *words, "epochs=4", "max_concurrent=1")
    assert result.code == 0, result.err
    stored = read_rows(tiny.parent / "out" / "tiny.csv")
    assert sorted(r["lr"] for r in stored) == ["0.01", "0.02"] and result.out.count("start ") == 2
    assert ("finished", "4") in [(r["status"], r["epochs"]) for r in stored]
    assert "best: lr=" in result.out


def test_optuna_ends_when_a_space_has_no_more_settings(tiny: Path) -> None:
    """At once, without a thousand proposals of what was tried."""
    sweep, asked = resolve(str(tiny), "", [], None, str(tiny.parent)), []

    def take(point: Mapping[str, Any]) -> bool:
        asked.append(point["lr"])
        return True

    search = optuna_search(sweep, [({"lr": 0.01}, 0.5)], take)
    assert search.suggest("a") == {"lr": 0.02, "seed": 1}
    assert search.suggest("b") == Searcher.FINISHED and asked == [0.02]


@pytest.mark.long
def test_a_weak_member_of_a_population_takes_over_from_a_strong_one(
    two_cpus: str, command: Command, tiny: Path
) -> None:
    words = [f"sweep={tiny}", *folders(tiny), "scheduler=pbt", "epochs=2", "lr=[0.05,0.02,1e-6]"]
    result = command("tune", *words)
    assert result.code == 0, result.err
    runs = tiny.parent / "runs" / "tiny"
    (stored,) = (json.loads(p.read_text()) for p in runs.glob("population-*.json"))
    (move,) = stored["moves"]
    strong = f"lr_{stored['values'][move['source']]['lr']}-"
    assert move["epoch"] == 1 and move["member"].startswith("lr_1e-06-")
    assert move["source"].startswith(strong) and move["values"]["lr"] in (0.05, 0.02, 1e-6)
    summary = json.loads((runs / move["member"] / "summary.json").read_text())
    assert summary["epochs"] == 2
    (change,) = summary["changes"]
    assert (change["key"], change["new"]) == ("lr", move["values"]["lr"])
    page = (tiny.parent / "out" / "tiny.md").read_text()
    assert f"epoch 1: weights of {move['source']}, lr={move['values']['lr']:.4g}" in page
    assert "took over" in page and "3 of 3 runs" in page and "best: lr=" in page
    assert command("tune", *words).code == 0  # nothing is left to do
    wrong = command("tune", f"sweep={tiny}", *folders(tiny), "scheduler=pbt", "engine=ray")
    assert wrong.code == 2 and "scheduler=pbt needs engine=local" in wrong.err


@pytest.mark.parametrize("search", ["grid", "random"])
def test_the_best_setting_is_named_with_its_value_and_its_command(
    two_cpus: str, command: Command, tiny: Path, search: str
) -> None:
    words = [f"sweep={tiny}", *folders(tiny), "lr=[0.05,1e-6]", "seeds=[1,2]", "samples=2"]
    result = command("tune", *words, f"search={search}")
    assert result.code == 0, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("best: ")]
    assert line.startswith("best: lr=0.05, validation accuracy (%) of full ") and " ± " in line
    assert "`python -m treeprop_ray.train experiment=digits " in line and " lr=0.05 " in line
    assert line in (tiny.parent / "out" / "tiny.md").read_text()


@pytest.mark.parametrize(
    ("space", "words", "epochs"),
    [
        ("{lr: [0.01]}", [], 2),
        ("{lr: [0.01]}", ["epochs=7"], 7),
        ("{epochs: [3, 9]}", [], 9),
        ("{epochs: {randint: [2, 12]}}", [], 12),
    ],
)
def test_a_sweep_knows_its_most_epochs_ahead(
    tiny: Path, space: str, words: list[str], epochs: int
) -> None:
    tiny.write_text(TINY.replace("{lr: [0.01, 0.02]}", space))
    assert resolve(str(tiny), "", words, None, "runs").epochs == epochs
