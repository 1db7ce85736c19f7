"""Settings: every mistake is one line with exit code 2 and nothing written."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Result

from treeprop_ray import config, methods
from treeprop_ray.errors import UserError

Command = Callable[..., Result]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["epoch=3"], ["unknown key epoch", "did you mean epochs?"]),
        (["model.width=3"], ["unknown key model.width"]),
        (["epochs=many"], ["epochs", "many"]),
        (["epochs=1.5"], ["epochs", "1.5"]),
        (["epochs=0"], ["epochs=0", "at least 1"]),
        (["model.blocks=0"], ["model.blocks=0", "at least 1"]),
        (["alpha=1.2"], ["alpha=1.2", "at most 1"]),
        (["alpha=-0.1"], ["alpha=-0.1", "at least 0"]),
        (["sigma=-0.1"], ["sigma=-0.1", "at least 0"]),
        (["lr=nan"], ["lr=nan", "finite"]),
        (["lr=0"], ["lr=0", "greater than 0"]),
        (["objective=all"], ["objective=all", "final_ce, node, node_all_ce"]),
        (["method=magic"], ["method=magic", "tree, bp"]),
        (["split=half"], ["split=half", "floor, right_full"]),
        (["experiment=nothing"], ["experiment=nothing", "digits", "mnist_d3"]),
        (["experiment=missing.yaml"], ["missing.yaml", "no such file"]),
        (["alpha=0.5", "beta=0.2"], ["alpha=0.5 beta=0.2", "alpha + beta = 1"]),
        (["alpha=0", "beta=0", "family=gaussian"], ["alpha=0 beta=0"]),
        (["sigma=0.1"], ["sigma=0.1", "Bernoulli"]),
        (["mc_samples=4"], ["mc_samples=4", "sigma=0"]),
        (["experiment=smnist_gru_small", "chain_lr=2"], ["chain_lr=2", "time.recipe"]),
        (
            ["model.init=xavier", "model.name=vit", "model.heads=4"],
            ["model.init=xavier", "mlp", "vit"],
        ),
        (["model.gain=4"], ["model.gain=4", "model.init=xavier", "torch"]),
        (["family=bernoulli", "model.activation=relu"], ["bernoulli", "sigmoid", "relu"]),
        (["microbatches=65"], ["microbatches=65", "batch=64"]),
        (["name=a/b"], ["name=a/b", "without '/'"]),
        (["batch=100000"], ["batch=100000", "digits has only"]),
        (["data.root=/no/such/folder", "experiment=mnist_d3"], ["data.root=/no/such/folder"]),
        (["device=cuda"], ["device=cuda", "no usable GPU"]),
        (["model.name=cnn"], ["model.name=cnn", "mlp, vit"]),
        (["model.name=vit", "model.heads=5"], ["model.heads=5", "model.hidden=64", "1, 2, 4"]),
        (
            ["model.name=vit", "model.heads=4", "model.patch=3"],
            ["model.patch=3", "image side 8", "1, 2, 4, 8"],
        ),
        (["model.name=vit", "model.heads=4", "model.mlp_ratio=0.001"], ["model.mlp_ratio=0.001"]),
        (["model.name=vit", "model.heads=4", "model.dropout=1"], ["model.dropout=1", "0.9"]),
        (["model.name=vit", "model.heads=4", "family=bernoulli"], ["bernoulli", "vit"]),
        (["model.dropout=0.1"], ["model.dropout=0.1", "model.name=vit"]),
        (["data.name=imagenet"], ["data.name=imagenet", "cifar10, cifar100, tinyimagenet"]),
        (["nonsense"], ["nonsense", "key=value"]),
        (["=3"], ["key=value"]),
        (["--verbose"], ["--verbose", "--help, --cfg"]),
        (["model=3"], ["model"]),
        (["epochs=[1,2]"], ["epochs"]),
        (["epochs={a: 1}"], ["epochs"]),
        (["lr=${nothing}"], ["nothing"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    command: Command, tmp_path: Path, words: list[str], parts: list[str]
) -> None:
    import torch

    if words == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    out = tmp_path / "runs"
    result = command("train", f"out={out}", *words)
    assert result.code == 2
    assert len(result.error_lines) == 1 and "Traceback" not in result.err
    for part in parts:
        assert part in result.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("epochs: [", "not readable as YAML"),
        ("just text", "unknown key just text"),
        ("- a\n- b", "must hold key: value lines"),
        ("epoch: 3", "unknown key epoch"),
        ("lr: fast", "lr"),
        ("model: {blocks: -1}", "model.blocks=-1"),
    ],
)
def test_a_bad_experiment_file_is_named(
    command: Command, tmp_path: Path, text: str, part: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    result = command("train", f"experiment={path}", f"out={tmp_path / 'runs'}")
    assert result.code == 2 and len(result.error_lines) == 1 and part in result.err


@pytest.mark.parametrize("path", sorted(config.EXPERIMENTS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_experiment_loads(path: Path) -> None:
    settings = config.load([f"experiment={path.stem}"])
    assert settings.experiment == path.stem


def test_the_longer_text_run_is_the_small_one_but_for_its_size() -> None:
    small, longer = (
        {k: v for k, _, v in config.walk(config.load([f"experiment=wikitext2_{name}"]))}
        for name in ("small", "bpe")
    )
    assert {k for k, v in longer.items() if v != small[k]} == {
        "experiment", "model.blocks", "model.hidden", "model.heads", "model.init_std",
        "data.tokenizer", "data.limit", "lr", "epochs", "checkpoint_every",
    }  # fmt: skip


BASES = ["mnist_d3", "cifar10_vit", "text_small", "smnist_gru", "cifar10_cff"]


@pytest.mark.parametrize("base", BASES)
def test_the_literal_readings_are_laid_over_an_experiment(base: str) -> None:
    plain = {k: v for k, _, v in config.walk(config.load([f"experiment={base}"]))}
    literal = config.load([f"experiment={base}+literal", "lr=0.5"])
    over = {k for k, _, v in config.walk(literal) if v != plain[k]}
    switches = {"input", "ce_at", "reduction", "bernoulli", "levels", "correction", "time.loss",
                "time.gradient", "data.augment_group", "experiment", "lr"}  # fmt: skip
    assert switches <= over <= switches | {"objective", "weights.right", "chain_lr"}
    assert methods.checked(literal).experiment == f"{base}+literal"
    assert config.run_name(literal).startswith(f"{base}+literal-")


def test_files_are_laid_over_each_other_from_left_to_right(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b+c.yaml"
    first.write_text("lr: 0.1\nmodel: {hidden: 5, blocks: 3}\n")
    second.write_text("model: {hidden: 6}\n")
    both = config.load([f"experiment=digits+{first}"])
    assert (both.lr, both.model.hidden, both.batch) == (0.1, 5, 64)
    assert config.run_name(both).startswith("digits+a-")
    assert config.load([f"experiment={second}"]).model.hidden == 6  # one file
    with pytest.raises(UserError, match="experiment=nothing: one of"):
        config.load(["experiment=digits+nothing"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["model.activation=tanh", "alpha=1", "reduction=sigma"], "sigma above 0"),
        (["alpha=1"], "alpha + beta = 1, or bernoulli=literal"),
        (["input=z"], "input=z: one of mean, sample"),
        (["correction=unit"], "one of mean, vjp, normalised, clipped"),
        (["data.augment_group=0"], "data.augment_group=0: must be at least 1"),
    ],
)
def test_readings_that_make_no_sense_are_one_line(words: list[str], part: str) -> None:
    with pytest.raises(UserError) as refused:
        methods.checked(config.load(words))
    assert part in str(refused.value)


def test_the_mnist_experiments_have_the_papers_settings() -> None:
    for depth in (2, 3, 4):
        s = config.load([f"experiment=mnist_d{depth}"])
        assert (s.batch, s.optimizer, s.lr, s.weight_decay, s.epochs) == (
            64,
            "adamw",
            1e-3,
            0.01,
            100,
        )
        assert (s.alpha, s.beta, s.model.blocks + 1) == (0.5, 0.5, 2**depth)
        assert s.objective == "node_all_ce"


def test_the_vit_experiments_have_the_papers_settings() -> None:
    for name, sigma, patch in [
        ("cifar10", 0.005, 4), ("cifar100", 0.002, 4), ("tinyimagenet", 0.005, 8)
    ]:  # fmt: skip
        s = config.load([f"experiment={name}_vit"])
        assert (s.batch, s.optimizer, s.lr, s.clip, s.epochs) == (512, "adamw", 5e-4, 1.0, 500)
        assert (s.weight_decay, s.model.dropout, s.data.augment) == (0.05, 0.1, "standard")
        assert (s.alpha, s.beta, s.sigma, s.noise_schedule) == (1, 0, sigma, "depth")
        m = s.model
        assert (m.hidden, m.heads, m.blocks, m.mlp_ratio, m.patch) == (240, 6, 7, 2, patch)


@pytest.mark.parametrize("name", ["train", "evaluate", "export", "bench"])
def test_help_lists_every_key(command: Command, name: str) -> None:
    result = command(name, "--help")
    assert result.code == 0 and f"python -m treeprop_ray.{name}" in result.out


def test_help_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from treeprop_ray import train; train.main(['--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_cfg_prints_the_resolved_settings_and_runs_nothing(
    command: Command, tmp_path: Path
) -> None:
    result = command("train", "--cfg", "epochs=7", f"out={tmp_path / 'x'}")
    assert result.code == 0 and "epochs: 7" in result.out and "hidden: 64" in result.out
    assert not (tmp_path / "x").exists()


def test_the_same_command_has_the_same_run_name_and_another_one_another() -> None:
    name = config.run_name(config.load(["lr=0.1"]))
    assert name == config.run_name(config.load(["lr=0.1", "threads=2"]))
    assert name != config.run_name(config.load(["lr=0.2"]))


@pytest.mark.parametrize("base", ["text_small", "cifar100_vit_small", "wikitext2_bpe"])
def test_the_grown_chain_is_laid_over_an_experiment(base: str) -> None:
    plain, grown = (
        methods.checked(config.load([f"experiment={name}"])) for name in (base, f"{base}+grown")
    )
    changed = {change.key for change in config.changes(plain, grown)}
    assert changed - {"experiment"} == {"finish", "finish_from"}
