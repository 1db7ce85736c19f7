"""bench generate: a row for every way to decode, of one run or of several."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Result

from treeprop_ray.benchmarks import generate

Command = Callable[..., Result]
WORDS = ["experiment=text_small", "model.hidden=12", "batch=8", "data.length=16", "steps=2"]


def test_every_way_to_decode_has_a_row(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, blocks in (("a", 3), ("b", 7)):
        words = [*WORDS, f"model.blocks={blocks}", f"out={tmp_path}", f"name={name}"]
        assert command("train", *words).code == 0
    monkeypatch.setattr(generate, "AHEAD", (2,))
    runs = f"run=[{tmp_path / 'a'},{tmp_path / 'b'}]"
    result = command("bench", "generate", runs, "rounds=1", "steps=1", f"out={tmp_path / 'o'}")
    assert result.code == 0, result.err
    with (tmp_path / "o" / "bench_generate.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    whole = [r for r in rows if r["tokens"] == "10"]
    drafts = {name: [r["draft"] for r in whole if r["run"] == name] for name in "ab"}
    assert [r["draft"] for r in rows if r["tokens"] == "3"] == ["-", "auto"] * 4
    assert drafts["a"] == ["-", "spine-1", "spine-2", "auto"] * 2
    assert drafts["b"] == ["-", "spine-1", "spine-2", "spine-3", "auto"] * 2
    for row in rows:
        greedy = row["decoding"] == "greedy"
        assert row["same tokens as plain"] == ("yes" if greedy else "-")
        assert row["draft"] != "-" or float(row["speed-up over plain"]) == 1
    page = (tmp_path / "o" / "bench_generate.md").read_text()
    assert "Run `b`: `text_small`, 7 blocks of width 12" in page


def test_a_run_without_short_paths_is_one_line(command: Command, tmp_path: Path) -> None:
    words = [*WORDS, "model.blocks=3", "method=bp", f"out={tmp_path}", "name=bp"]
    assert command("train", *words).code == 0
    result = command("bench", "generate", f"run={tmp_path / 'bp'}", f"out={tmp_path}")
    assert result.code == 2 and "method=bp has no short paths" in result.error_lines[0]
