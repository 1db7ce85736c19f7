"""The bench command that checks the cost model against what was measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeprop_ray.benchmarks import plan, plan_checks

ROOT = Path(__file__).parent.parent.parent


def test_plan_needs_measurements_to_check_itself_against(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    result = command("bench", "plan", f"out={tmp_path}")
    assert result.code == 2 and "run bench span" in result.err and len(result.error_lines) == 1


def test_the_check_finds_the_hop_that_was_in_the_measurement() -> None:
    hop = 0.0031
    rows = [
        {
            "N": str(N),
            "t (ms)": "20",
            "tree (ms)": str(1000 * plan.emulated(N, 0.02, hop, False)),
            "chain (ms)": "0",
            "chain of few stages (ms)": str(1000 * plan.emulated(N, 0.02, hop, True)),
        }
        for N in (8, 16, 64)
    ]
    checks, found = plan.check_span(rows)
    assert found == pytest.approx(hop, rel=1e-3)
    assert plan.error_of(checks) == pytest.approx(1, rel=1e-3) and len(checks) == 6


def test_copies_are_checked_by_each_transport_that_was_measured() -> None:
    trees = {"N": "8", "devices": "16", "ms per step": "130"}
    kinds = ("trees, store", "trees, stream", "data-parallel")
    rows = plan_checks.replicas([trees | {"training": kind} for kind in kinds], 0.004)
    assert [r["run"].split(", ")[-1] for r in rows] == ["store", "stream"]
    assert [r["measured (ms)"] for r in rows] == pytest.approx([130.0, 130.0])
    assert 120 < rows[1]["predicted (ms)"] < rows[0]["predicted (ms)"]


def test_plan_writes_both_tables(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SIZES", {"GPT-2 large": 36})
    monkeypatch.setattr(plan, "DEVICES", (8,))
    for name in ("bench_span.csv", "bench_step_ray.csv"):
        shutil.copy(ROOT / "results" / name, tmp_path)
    result = command("bench", "plan", f"out={tmp_path}")
    assert result.code == 0, result.err
    rows = plan.read(str(tmp_path), "bench_plan")
    assert [r["link"] for r in rows] == ["NVLink", "PCIe", "Ethernet"]
    assert "Nothing in this table was measured" in (tmp_path / "bench_plan.md").read_text()
    checks = plan.read(str(tmp_path), "bench_plan_check")
    (fitted,) = [r for r in checks if "fitted" in r["run"]]
    assert float(fitted["predicted / measured"]) == pytest.approx(1, abs=1e-3)
