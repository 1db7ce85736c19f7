"""Settings fuzz: whatever is wrong with them, exit code 2, one line, no traceback, nothing written.

Every made-up case is wrong by construction, so none of them may train.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from treeprop_ray import config, train
from treeprop_ray.run.trainer import Trainer

FIELDS = {key: (f, value) for key, f, value in config.walk(config.Settings())}
GROUPS = sorted({key.partition(".")[0] for key in FIELDS if "." in key})
NUMBERS = [k for k, (_, v) in FIELDS.items() if isinstance(v, int | float) and k != "fresh"]
FLAGS = [k for k in NUMBERS if isinstance(FIELDS[k][1], bool)]
NUMBERS = [k for k in NUMBERS if k not in FLAGS]
CHOICES = ["method", *(k for k, (f, _) in FIELDS.items() if "choices" in f.metadata)]
PATHS = ["name", "out", "storage", "ray.address", "data.root"]
Case = tuple[str, Any]  # key, value

letters = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3, max_size=12)
anything = st.text(max_size=20)


def outside(key: str) -> st.SearchStrategy[Case]:
    """Numbers that break the field's rule, and things that are no number."""
    rule, default = FIELDS[key][0].metadata, FIELDS[key][1]
    found: list[st.SearchStrategy[Any]] = [
        st.sampled_from([math.inf, -math.inf, math.nan, 10**30, -(10**30), 1e300]),
        letters.map(lambda t: f"{t}!"),
        st.lists(st.integers(), max_size=3),
        st.dictionaries(letters, st.integers(), max_size=2),
    ]
    if isinstance(default, int):
        found.append(st.floats(-50, 50).map(lambda x: math.floor(x) + 0.5))
    if "low" in rule:
        found.append(st.integers(1, 10**6).map(lambda d: rule["low"] - d))
    if "above" in rule:
        found.append(st.integers(0, 10**6).map(lambda d: rule["above"] - d))
    if "high" in rule:
        found.append(st.integers(1, 10**6).map(lambda d: rule["high"] + d))
    return st.tuples(st.just(key), st.one_of(found))


def unknown(key: str) -> bool:
    return key not in FIELDS and key not in GROUPS and key.partition(".")[0] not in FIELDS


bad_choice = st.tuples(
    st.sampled_from(CHOICES), st.one_of(letters.map(lambda t: f"{t}!"), st.integers())
)
bad_flag = st.tuples(
    st.sampled_from(FLAGS), st.one_of(letters.map(lambda t: f"{t}!"), st.integers(2))
)
bad_group = st.tuples(st.sampled_from(GROUPS), st.one_of(st.integers(), letters, st.none()))
bad_key = st.tuples(
    st.one_of(letters, st.builds("{}.{}".format, st.sampled_from(GROUPS), letters)).filter(unknown),
    st.one_of(st.integers(), anything),
)
bad_path = st.tuples(
    st.sampled_from(PATHS),
    st.builds(lambda a, c, b: f"x{a}{c}{b}", letters, st.sampled_from("\0\n\r\t\x1b\x7f"), letters),
)
one_bad = st.one_of(
    st.sampled_from(NUMBERS).flatmap(outside), bad_choice, bad_flag, bad_group, bad_key, bad_path
)
good = st.sampled_from(["epochs=3", "lr=0.01", "model.hidden=8", "seed=5", "batch=16"])
broken_yaml = st.one_of(
    st.text("abc:,{}\"' \n-&*!%@`|>", max_size=30).map(lambda t: f"lr: [{t}"),
    st.binary(min_size=1, max_size=30).map(lambda b: b"\xff\xfe\xfd" + b),
    anything.map(lambda t: f"- a\n- {t!r}"),
    st.sampled_from(["lr: *nothing", "lr: !!python/object:os.system x", "a: b: c", "\t- x", "{"]),
)  # fmt: skip


def as_word(case: Case) -> str:
    return (
        f"{case[0]}={yaml.safe_dump(case[1], default_flow_style=True).removesuffix('...').strip()}"
    )


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A working folder that must stay empty."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
            assert list(Path(folder).iterdir()) == []
        finally:
            os.chdir(before)


def assert_bad_input(*words: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with empty_folder(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = train.main(list(words))
    assert code == 2, (words, err.getvalue())
    assert len(err.getvalue().splitlines()) == 1 and err.getvalue().startswith("error: ")
    assert "Traceback" not in err.getvalue() and out.getvalue() == ""


@pytest.fixture(scope="module", autouse=True)
def nothing_trains() -> Iterator[None]:
    """A case that slips through must fail the test, not start to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", lambda self: pytest.fail("was taken for good"))
        yield


relaxed = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=250
)


@relaxed
@given(st.lists(good, max_size=2, unique_by=lambda w: w.partition("=")[0]), one_bad)
@example([], ("model.hidden", 2**40))
def test_malformed_values_are_bad_input(words: list[str], case: Case) -> None:
    words = [w for w in words if w.partition("=")[0] != case[0]]
    assert_bad_input(*words, as_word(case))


@settings(relaxed, max_examples=100)
@given(anything.filter(lambda t: not t.startswith("-") and unknown(t.partition("=")[0].strip())))
@example("")
@example("=")
@example("a.b.c=1")
@example("lr=${lr}")
@example("model.=3")
@example(".=3")
@example("a[0]=3")
def test_malformed_words_are_bad_input(word: str) -> None:
    assert_bad_input(word)


@settings(relaxed, max_examples=150)
@given(st.one_of(one_bad.map(lambda case: yaml.safe_dump({case[0]: case[1]})), broken_yaml))
def test_malformed_files_are_bad_input(text: str | bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert_bad_input(f"experiment={path}")


@pytest.mark.parametrize("words", [["hosts=2"], ["placement=packed"]])
def test_what_a_recurrent_network_ignores_is_bad_input(words: list[str]) -> None:
    assert_bad_input("experiment=digits_gru", "engine=ray", *words)
