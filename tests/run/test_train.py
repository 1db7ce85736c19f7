"""The train command: run folder, resume, NaN, leak. Small runs on the embedded digits."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import Result, StopAt, Stopped
from safetensors.torch import load_file

from treeprop_ray import config, methods
from treeprop_ray.core.tree import Tree
from treeprop_ray.run import checkpoint
from treeprop_ray.run import folder as runs
from treeprop_ray.run.trainer import Trainer

SMALL = ["model.hidden=12", "model.blocks=4", "batch=64", "log_every=5"]
Command = Callable[..., Result]


def newest(folder: Path) -> checkpoint.Checkpoint:
    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_writes_its_folder(command: Command, tmp_path: Path) -> None:
    result = command("train", *SMALL, "epochs=2", "name=one", f"out={tmp_path}")
    assert result.code == 0 and "full" in result.out and str(tmp_path / "one") in result.out
    folder = tmp_path / "one"
    rows = pd.read_csv(folder / "metrics.csv")
    steps, epochs = rows[rows.kind == "step"], rows[rows.kind == "epoch"]
    assert list(epochs.epoch) == [1, 2] and len(steps) == 8
    for column in ("loss/1", "loss/4", "grad_norm", "step_seconds", "data_share", "lr"):
        assert steps[column].notna().all(), column
    assert steps["leak"].notna().sum() == 2
    for path in ("spine-1", "spine-2", "full"):
        assert epochs[f"accuracy/{path}"].between(0, 1).all()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 * (1293 // 64) and summary["samples_seen"] == summary["steps"] * 64
    assert summary["parameters_deployed"] < summary["parameters_trained"]
    assert {"command", "commit", "versions", "hardware", "seed"} <= summary.keys()
    assert config.load_file(folder / "config.yaml").model.hidden == 12
    assert list((folder / "tensorboard").iterdir())
    for figure in ("tree_loss.png", "path_accuracy.png"):
        assert (folder / "figures" / figure).stat().st_size > 1000


def test_epochs_are_counted_as_far_as_the_run_goes(command: Command, tmp_path: Path) -> None:
    """steps= may end it in the middle of the second of sixty."""
    result = command("train", *SMALL, "steps=30", f"out={tmp_path}")
    first, second, *_ = result.out.splitlines()
    assert first.startswith("epoch 1/2  ") and second.startswith("epoch 2/2  ")


@pytest.mark.parametrize("method", ["tree", "bp"])
def test_stop_and_resume_is_bitwise_one_run(command: Command, tmp_path: Path, method: str) -> None:
    words = [
        *SMALL, f"out={tmp_path}", f"method={method}", "epochs=3", "clip=0.5", "optimizer=adamw",
        "schedule=cosine", "warmup=0.1", "model.activation=tanh", "sigma=0.05", "alpha=1",
        "beta=0.5", "checkpoint_every=7",
    ]  # fmt: skip
    assert command("train", *words, "name=whole").code == 0

    # in the middle of the second epoch, after the checkpoint of step 28
    with pytest.raises(Stopped):
        Trainer.of(config.load([*words, "name=cut"]), callbacks=[StopAt(31)]).train()
    assert newest(tmp_path / "cut").meta["step"] == 28
    again = command("train", *words, "name=cut")
    assert again.code == 0 and "continuing from" in again.out

    whole, cut = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert whole.meta["step"] == cut.meta["step"] == 60
    assert same(whole.weights, cut.weights) and same(whole.optimizer, cut.optimizer)
    a, b = (pd.read_csv(tmp_path / n / "metrics.csv") for n in ("whole", "cut"))
    timing = ["step_seconds", "data_share"]
    pd.testing.assert_frame_equal(a.drop(columns=timing), b.drop(columns=timing))


def test_a_finished_run_is_not_trained_again(command: Command, tmp_path: Path) -> None:
    words = [*SMALL, "epochs=1", f"out={tmp_path}", "name=done"]
    command("train", *words)
    before = (tmp_path / "done" / "metrics.csv").stat().st_mtime_ns
    again = command("train", *words)
    assert again.code == 0 and "finished" in again.out
    assert (tmp_path / "done" / "metrics.csv").stat().st_mtime_ns == before
    assert command("train", *words, "fresh=true").code == 0
    assert (tmp_path / "done" / "metrics.csv").stat().st_mtime_ns != before


def test_other_settings_do_not_overwrite_a_run(command: Command, tmp_path: Path) -> None:
    words = [*SMALL, "epochs=1", f"out={tmp_path}", "name=kept"]
    command("train", *words)
    weights = newest(tmp_path / "kept").weights
    result = command("train", *words, "lr=0.5")
    assert result.code == 2 and "lr: 0.003 -> 0.5" in result.err
    assert same(weights, newest(tmp_path / "kept").weights)


def test_more_epochs_continue_a_finished_run(command: Command, tmp_path: Path) -> None:
    words = [*SMALL, f"out={tmp_path}"]
    command("train", *words, "epochs=2", "name=straight")
    command("train", *words, "epochs=1", "name=longer")
    result = command("train", *words, "epochs=2", "name=longer")
    assert "continuing" in result.out
    assert same(newest(tmp_path / "straight").weights, newest(tmp_path / "longer").weights)


def test_nan_stops_with_node_level_and_step_and_keeps_the_checkpoint(
    command: Command, tmp_path: Path
) -> None:
    words = [
        *SMALL, f"out={tmp_path}", "name=nan", "model.activation=relu", "optimizer=sgd",
        "checkpoint_every=1", "epochs=3", "lr=1e15",
    ]  # fmt: skip
    result = command("train", *words)
    assert result.code == 1
    assert len(result.error_lines) == 1
    assert all(word in result.err for word in ("node", "level", "step"))
    kept = checkpoint.newest(tmp_path / "nan" / "checkpoints")
    assert kept is None or all(torch.isfinite(v).all() for v in kept.weights.values())


def test_the_leak_is_seen_and_warned_about(command: Command, tmp_path: Path) -> None:
    """The literal correction writes labels into the states; the mean-reduced one does not."""
    words = [
        *SMALL, "model.activation=tanh", "alpha=1", "beta=1", "epochs=25", f"out={tmp_path}",
        "objective=node",
    ]  # fmt: skip
    leaky = command("train", *words, "correction=vjp", "correction_scale=5", "name=leaky")
    assert "label leak" in leaky.err and leaky.err.count("label leak") == 1
    clean = command("train", *words, "name=clean")
    assert "label leak" not in clean.err
    leaks = {
        name: json.loads((tmp_path / name / "summary.json").read_text())["leak"]
        for name in ("leaky", "clean")
    }
    assert leaks["leaky"] > 0.5 > abs(leaks["clean"])


def test_checkpoints_are_pruned_to_the_newest_and_the_best(
    command: Command, tmp_path: Path
) -> None:
    command("train", *SMALL, "epochs=6", f"out={tmp_path}", "name=p", "keep_last=2")
    steps = checkpoint.steps(tmp_path / "p" / "checkpoints")
    best = newest(tmp_path / "p").meta["best"]
    assert steps == sorted({100, 120, best["step"]})
    again = command("evaluate", f"run={tmp_path / 'p'}", "checkpoint=best", "split=test")
    assert f"{100 * best['test']['accuracy']:.2f} %" in again.out.split("full")[1]


def test_eval_test_scores_the_test_split_at_every_epoch_and_survives_a_stop(
    command: Command, tmp_path: Path
) -> None:
    words = [*SMALL, "epochs=12", f"out={tmp_path}"]
    whole = command("train", *words, "name=whole", "eval_test=true")
    assert whole.code == 0, whole.err
    command("train", *words, "name=cut", "eval_test=true", "steps=100")
    assert command("train", *words, "name=cut", "eval_test=true").code == 0
    folders = [tmp_path / "whole", tmp_path / "cut"]
    found = [json.loads((f / "summary.json").read_text())["test_by_epoch"] for f in folders]
    assert found[0] == found[1]
    rows = pd.read_csv(tmp_path / "whole" / "metrics.csv")
    by_epoch = rows[rows.kind == "epoch"].test_accuracy
    assert len(by_epoch) == 12 and by_epoch.nunique() > 3
    highest, late = found[0]["highest"], found[0]["late"]
    assert highest["accuracy"] == pytest.approx(by_epoch.max())
    assert highest["epoch"] == 1 + by_epoch.argmax()
    assert late["accuracy"] == pytest.approx(by_epoch[-10:].mean())
    final = json.loads((tmp_path / "whole" / "summary.json").read_text())["final"]
    assert by_epoch.iloc[-1] == pytest.approx(final["test"]["full"]["accuracy"])


def test_weights_are_keyed_by_edge(command: Command, tmp_path: Path) -> None:
    command("train", *SMALL, "epochs=1", f"out={tmp_path}", "name=k")
    found = newest(tmp_path / "k")
    weights = load_file(Path(found.path) / "weights.safetensors")
    assert {k.split("/")[0] for k in weights} == {f"{l}-{r}" for l, r in Tree(5).blocks}
    assert all(k.count("/") == 2 for k in load_file(Path(found.path) / "optimizer.safetensors"))


def test_block_applications_are_counted() -> None:
    for words, N, count in [
        (["method=bp"], 8, 8),
        (["objective=node_all_ce"], 8, 14),  # 7 left, 4 right, 3 times the head
        (["objective=node", "alpha=1", "beta=0"], 8, 12),  # the head only at the finest level
        (["objective=final_ce", "alpha=1", "beta=0"], 8, 8),
    ]:
        settings = config.load(words)
        assert methods.of(settings).outline(settings, Tree(N)).applications == count


def test_provenance_names_a_script_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["examples/bias_bound.py", "--steps", "200"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert runs.this_command() == "python examples/bias_bound.py --steps 200"
    monkeypatch.setattr(sys, "argv", ["/opt/here/examples/bias_bound.py"])
    assert runs.this_command() == "python bias_bound.py"  # no paths of this machine in a table


@pytest.mark.parametrize(
    ("words", "ratio"),
    [(["beta=0.5", "correction=normalised", "correction_scale=0.2"], 0.1), (["beta=0"], 0.0)],
)
def test_every_run_tells_how_large_its_correction_is(
    command: Command, tmp_path: Path, words: list[str], ratio: float
) -> None:
    """|beta * correction| / |mu_fwd|: of a normalised correction it is known beforehand."""
    words = [*words, "model.activation=tanh", "alpha=1", "steps=5", "microbatches=2"]
    result = command("train", *SMALL, *words, "name=one", f"out={tmp_path}")
    assert result.code == 0
    rows = pd.read_csv(tmp_path / "one" / "metrics.csv")
    assert rows.columns[-1] == "correction_ratio"
    logged = rows[rows.kind == "step"]["correction_ratio"]
    assert len(logged) and list(logged) == pytest.approx([ratio] * len(logged), rel=1e-5)
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["correction_ratio"] == pytest.approx(ratio, rel=1e-5)
    nodes = summary["correction_ratios"]
    assert nodes == ({n: pytest.approx(ratio, rel=1e-5) for n in "1234"} if ratio else {})
