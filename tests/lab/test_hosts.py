"""Hosts with addresses of their own (root only): what only a real network can do to a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab.__main__ import Lab, Laboratory
from lab.switch import possible


@pytest.fixture(scope="module", autouse=True)
def hosts_are_possible() -> None:
    if not os.environ.get("TREEPROP_LAB"):
        pytest.skip("takes minutes: TREEPROP_LAB=1 runs it")
    if why := possible():
        pytest.skip(f"hosts in network namespaces: skipped ({why})")


@pytest.mark.slow
def test_two_hosts_that_cannot_reach_each_other_do_not_end_the_run(tmp_path: Path) -> None:
    """Both reach the head, so Ray counts both as alive."""
    runs = Laboratory(Lab(), tmp_path).on_hosts(kinds=["cut_pair"])
    assert [(run.complaints, len(run.rows)) for run in runs] == [([], 1)] * 2  # store, stream
    for run in runs:
        told = (run.folder / "driver.log").read_text()
        assert "cannot reach each other; going on without" in told
        assert "continuing on 1 actors" in told
