"""Every how-to is a notebook that runs: its cells, one after the other, in this process.

Those that start Ray find one that is up (warm.py); with TREEPROP_NOTEBOOKS=1 (`make notebooks`)
they start their own, as a reader's would.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm import warm_ray

HOWTO = Path(__file__).parent.parent / "examples" / "howto"
NOTEBOOKS = sorted(path.stem for path in HOWTO.glob("*.ipynb"))
STARTS_RAY = {"cluster", "sweeps"}


@pytest.fixture(scope="module")
def ray_that_is_up() -> Iterator[None]:
    with warm_ray():
        yield


def code_of(name: str) -> list[str]:
    cells = json.loads((HOWTO / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_there_is_a_notebook_for_every_how_to() -> None:
    asked = {
        "own_model",
        "own_data",
        "hugging_face",
        "cluster",
        "sweeps",
        "faults",
        "export",
        "plan",
    }
    assert set(NOTEBOOKS) == asked >= STARTS_RAY


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_holds_no_outputs_and_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    cells = json.loads((HOWTO / f"{name}.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    if name in STARTS_RAY and not os.environ.get("TREEPROP_NOTEBOOKS"):
        request.getfixturevalue("ray_that_is_up")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for module in ("my_model", "my_data"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    space: dict[str, Any] = {"__name__": "__notebook__"}
    for number, text in enumerate(code_of(name)):
        exec(compile(text, f"{name}, code cell {number}", "exec"), space)
