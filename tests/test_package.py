"""The console script, and what the source distribution holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from treeprop_ray.__main__ import COMMANDS, main

ROOT = Path(__file__).parent.parent


def test_without_a_word_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name:<9} " in out for name in COMMANDS)
    assert "Train a network by TreeProp" in out


def test_every_command_of_the_package_is_listed() -> None:
    package = ROOT / "treeprop_ray"
    commands = {p.stem for p in package.glob("*.py") if "cli.main(" in p.read_text()}
    assert commands == set(COMMANDS)


def test_the_root_holds_the_commands_and_little_else() -> None:
    modules = {p.stem for p in (ROOT / "treeprop_ray").glob("*.py")}
    assert modules - set(COMMANDS) == {"__init__", "__main__"}


def test_a_command_is_a_screen_or_two_and_leaves_the_work_to_the_rooms() -> None:
    files = [ROOT / "treeprop_ray" / f"{name}.py" for name in COMMANDS]
    assert [f.name for f in files if len(f.read_text().splitlines()) > 90] == []


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "epochs=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'trian'" in line and "train" in line


def test_a_command_gets_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", "epochs=3"]) == 0
    assert "epochs: 3" in capsys.readouterr().out
    assert main(["train", "epochs=0"]) == 2


def test_help_shows_the_values_that_apply(capsys: pytest.CaptureFixture[str]) -> None:
    def hidden(*words: str) -> str:
        assert main(["train", *words, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line.split()[1] for line in lines if line.strip().startswith("model.hidden"))

    assert hidden() == hidden("experiment=digits") and hidden("experiment=mnist_d3") == "500"
    assert hidden("experiment=mnist_d3", "model.hidden=7") == "7"
    assert main(["train", "experiment=nothing", "--help"]) == 2


def test_the_source_distribution_has_all_that_a_user_needs(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [f for f in listed.stdout.split("\0") if f and (ROOT / f).is_file()]
    for name in files:
        if not name.startswith("results/"):
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "source" / name)
    build = "from setuptools import build_meta as b; b.build_sdist('..')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path / "source", check=True, capture_output=True
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    kinds = ("clusters/", "docs/", "examples/", "tune_spaces/", "treeprop_ray/", "tests/")
    wanted = [f for f in files if f.startswith(kinds) and "/." not in f]
    wanted += ["constraints.txt", "LICENSE", "README.md", "Makefile", "pyproject.toml"]
    assert [f for f in wanted if f not in inside] == []
