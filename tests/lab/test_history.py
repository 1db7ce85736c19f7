"""The checker itself: it must find what is wrong, and the nemesis must be the same for a seed."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lab import fuzz, history, nemesis
from lab.history import Entry

WHOLE = [Entry("host-0", step, part, f"h{step}{part}") for step in range(4) for part in "ab"]


def test_an_undisturbed_history_has_no_complaints() -> None:
    verdict = history.check(WHOLE, WHOLE, 4)
    assert not verdict.complaints and verdict.repeated == 0


def test_replays_count_and_may_not_differ() -> None:
    again = [*WHOLE, *WHOLE[2:6]]
    assert not history.check(again, WHOLE, 4).complaints
    assert history.check(again, WHOLE, 4).repeated == 2
    forged = [*WHOLE[:3], replace(WHOLE[3], hash="other"), *WHOLE[4:]]
    assert history.check(forged, WHOLE, 4).complaints == ["step 1, part b of host-0: other weights"]


def test_what_was_never_done_is_missed() -> None:
    assert history.check(WHOLE[:-1], WHOLE, 4).complaints == ["step 3, part b: never done"]
    assert not history.check(WHOLE[:-2], WHOLE, 3).complaints


def test_a_torn_last_line_is_no_entry(tmp_path: Path) -> None:
    history.record(tmp_path, "host-0", 3, {"a": "h3a"})
    with (tmp_path / "history.txt").open("a") as f:
        f.write("host-0 4 a h4")
    (entry,) = history.read(tmp_path)
    assert (entry.actor, entry.step, entry.part, entry.hash) == ("host-0", 3, "a", "h3a")


def test_a_plan_is_a_function_of_its_seed_and_covers_all_phases() -> None:
    actors = ["host-0", "host-1"]
    assert nemesis.plan(3, 14, actors, 60) == nemesis.plan(3, 14, actors, 60)
    assert nemesis.plan(3, 14, actors, 60) != nemesis.plan(4, 14, actors, 60)
    faults = nemesis.plan(3, 14, actors, 60, [*nemesis.KINDS, *nemesis.DRIVER])
    assert {f.phase for f in faults} == set(nemesis.PHASES)
    assert {f.kind for f in faults} == {*nemesis.KINDS, *nemesis.DRIVER}
    assert all(1 <= f.step < 60 for f in faults)


# -- a short form of the fuzz ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_some_made_up_command_lines_end_in_one_line(folder: Path) -> None:
    tally = fuzz.Tally()
    fuzz.fuzz_lines(40, 11, folder, tally)
    assert [o.case for o in tally.bad] == [] and len(tally.rows) == 10


def test_some_damaged_folders_end_in_one_line_or_in_the_same_weights(folder: Path) -> None:
    tally = fuzz.Tally()
    fuzz.fuzz_files(14, 11, folder, tally)
    assert [(o.case, o.wrong, o.err) for o in tally.bad] == []


def test_the_fuzz_notices_a_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import treeprop_ray.compare

    def broken(words: list[str]) -> int:
        raise KeyError("nobody caught it")

    monkeypatch.setattr(treeprop_ray.compare, "main", broken)
    assert fuzz.run("compare", []).wrong == "raised KeyError('nobody caught it')"


@pytest.mark.parametrize("harm", sorted(fuzz.HARMS))
def test_every_harm_changes_a_file(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "summary.json"
    before = b'{"steps": 4, "name": "r"}'
    path.write_bytes(before)
    fuzz.HARMS[harm](random.Random(1), path)
    assert not path.is_file() or path.is_symlink() or path.read_bytes() != before
    shutil.rmtree(tmp_path, ignore_errors=True)
