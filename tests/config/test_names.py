"""model.name and data.name also take package.module:factory; each way to fail is one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treeprop_ray import config
from treeprop_ray.errors import UserError

MODULE = """
class Networks:
    @staticmethod
    def wide(): return "wide"
def network(): return "plain"
width = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with modules of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "own_networks.py").write_text(MODULE)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "inner.py").write_text(MODULE)
    (tmp_path / "own_syntax.py").write_text("def network(:")
    (tmp_path / "own_error.py").write_text("raise RuntimeError('first\\nsecond')")
    (tmp_path / "own_exit.py").write_text("import sys; sys.exit(3)")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("value", "gives"),
    [
        ("own_networks:network", "plain"),
        ("own_networks:Networks.wide", "wide"),
        ("own_package.inner:network", "plain"),
    ],
)
def test_a_factory_of_the_current_folder_is_found(folder: Path, value: str, gives: str) -> None:
    assert config.imported("model.name", value)() == gives


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("own_nothing:network", "No module named 'own_nothing'"),
        ("own_package.nothing:network", "No module named 'own_package.nothing'"),
        ("own_networks:nothing", "has no attribute 'nothing'"),
        ("own_networks:Networks.deep", "has no attribute 'deep'"),
        ("own_networks:.", "has no attribute ''"),
        ("own_networks:width", "width is of type int, not callable"),
        ("own_syntax:network", "SyntaxError: invalid syntax"),
        ("own_error:network", "RuntimeError: first"),
        ("own_exit:network", "SystemExit: 3"),
        ("..:network", "cannot be imported"),
    ],
)
def test_what_cannot_be_imported_is_one_line(folder: Path, value: str, reason: str) -> None:
    with pytest.raises(UserError) as error:
        config.imported("model.name", value)
    text = str(error.value)
    assert text.startswith(f"model.name={value}: ") and reason in text and "\n" not in text


@pytest.mark.parametrize(
    "words",
    [
        ["model.name=own.networks:network", "data.name=own.sets:samples"],
        ["model.name=own:gpt", "data.name=topics", "data.tokenizer=gpt2"],
        ["model.name=gpt", "data.name=own:texts", "model.heads=4", "data.tokenizer=gpt2"],
        ["model.name=own:network", "model.heads=5", "model.dropout=0.1", "model.output_block=true"],
        ["model.name=own:network", "model.init=xavier", "family=bernoulli", "alpha=1"],
        ["model.name=own:network", "model.gain=4", "data.permuted=true"],
        ["model.name=own:network", "data.name=adding"],
        ["model.name=gru", "data.name=own:sequences", "data.permuted=true", "beta=0"],
    ],
)
def test_ones_own_names_pass_the_checks_of_shipped_ones(words: list[str]) -> None:
    settings = config.load(words)
    names = (f"model.name={settings.model.name}", f"data.name={settings.data.name}")
    assert names[0] in words and (names[1] in words or settings.data.name == "digits")


@pytest.mark.parametrize("key", ["model.name", "data.name"])
@pytest.mark.parametrize("value", ["own", "own.networks", "a:b:c", "a b:c", ":c", "a:", "a/b:c"])
def test_other_names_are_refused(key: str, value: str) -> None:
    with pytest.raises(UserError) as error:
        config.load([f"{key}='{value}'"])
    assert str(error.value).startswith(f"{key}={value}: one of ")
    assert str(error.value).endswith(", or package.module:factory")


def test_closed_lists_stay_closed() -> None:
    with pytest.raises(
        UserError, match=r"^correction=own:mine: one of mean, vjp, normalised, clipped$"
    ):
        config.load(["correction=own:mine"])
