"""The checker itself: it must find what is wrong, and the nemesis must be the same for a seed."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lab import fuzz, history, nemesis, pages, soak
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
    faults = nemesis.plan(3, 36, actors, 60, [*nemesis.KINDS, *nemesis.DRIVER])
    assert {f.phase for f in faults} == set(nemesis.PHASES)
    assert {f.kind for f in faults} == {*nemesis.KINDS, *nemesis.DRIVER}
    assert all(f.phase == "checkpoint" for f in faults if f.kind == "full_disk")
    assert all(1 <= f.step < 60 for f in faults)


def test_no_kind_and_no_phase_keeps_to_one_layout() -> None:
    """Layouts take turns from run to run, and a run has three faults."""
    for cards in (nemesis.PHASES, ("kill", "pause", "clock")):
        hands = [nemesis.dealt(1, cards, 3 * run, 3) for run in range(36)]
        for layout in range(3):
            assert {card for hand in hands[layout::3] for card in hand} == set(cards)
        assert {sum(hand.count(card) for hand in hands) for card in cards} == {108 // len(cards)}


# -- what is told of many runs, and of a long one ------------------------------------------------


def test_a_process_that_grows_is_told_and_one_that_settles_is_not() -> None:
    """The third became an actor on the way; the fourth had gone before the end."""
    kinds = {1: lambda k: 200 + 3.0 * k, 2: lambda k: min(300.0, 200 + 20.0 * k), 3: lambda k: 90.0}
    samples = [
        {"transport": "store", "step": 1000 * k, "pid": pid, "MB": mb(k), "seconds": k,
         "process": "idle worker" if (pid, k) == (3, 1) else f"process {pid}"}
        for pid, mb in {**kinds, 4: lambda k: 9.0 * k}.items()
        for k in range(1, 51)
        if pid != 4 or k < 30
    ]  # fmt: skip
    rows = {row["process"]: row["flat"] for row in soak.table(samples)}
    assert rows == {"process 1": "no", "process 2": "yes", "process 3": "yes"}


def test_rows_of_faults_go_on_where_they_were_torn(tmp_path: Path) -> None:
    row = dict.fromkeys(pages.COLUMNS, "1") | {"kind": "kill", "phase": "forward", "wrong": ""}
    pages.store(tmp_path / "rows.csv", [row])
    pages.store(tmp_path / "rows.csv", [{**row, "run": "2", "seconds": "3", "wrong": "hangs"}])
    with (tmp_path / "rows.csv").open("a") as f:
        f.write("3,abc,two")
    rows = pages.stored(tmp_path / "rows.csv")
    assert [r["run"] for r in rows] == ["1", "2"]
    (told,) = pages.table(rows)
    assert (told["times"], told["wrong"], told["longest"]) == ("2", "1", "3.0")


# -- a short form of the fuzz ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_some_made_up_command_lines_end_in_one_line(folder: Path) -> None:
    tally = fuzz.Tally()
    fuzz.fuzz_lines(40, 11, folder, tally)
    assert [o.case for o in tally.bad] == [] and len(tally.rows) == 12


def test_some_damaged_folders_end_in_one_line_or_in_the_same_weights(folder: Path) -> None:
    tally = fuzz.Tally()
    fuzz.fuzz_files(7, 11, folder, tally)  # one for each command
    assert [(o.case, o.wrong, o.err) for o in tally.bad] == []


def test_cases_that_were_counted_are_not_run_again(tmp_path: Path) -> None:
    first, again = fuzz.Tally(), fuzz.Tally()
    first.take_up(tmp_path / "rows.csv")
    first.add("line 0", "lines: train", fuzz.Outcome("train x", 2, "error: x"))
    first.add("line 1", "lines: train", fuzz.Outcome("train y", 1, "Traceback", "traceback"))
    again.take_up(tmp_path / "rows.csv")
    assert again.rows == first.rows and again.done == {"line 0", "line 1"}
    assert [outcome.wrong for outcome in again.bad] == ["traceback"]


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


def test_the_soak_reads_how_far_a_run_is(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    assert soak.last_step(metrics) == 0
    metrics.write_text("kind,step,loss\nstep,100,4.7\nvalidation,100,\nstep,200,4.4\nst")
    assert soak.last_step(metrics) == 200
