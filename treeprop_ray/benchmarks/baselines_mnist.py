"""bench baselines: BP, CFF+M and TreeProp on MNIST side by side, read from finished runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeprop_ray import config, methods
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.tables import markdown, write_table

HIDDEN, EPOCHS = 100, 10
METHODS = {"bp": "BP", "cff": "CFF+M", "tree": "TreeProp"}
PAPER = {  # hidden 100, the table of the paper's MNIST appendix
    4: {"bp": "97.96 ± 0.02", "cff": "95.52 ± 0.02", "tree": "98.01 ± 0.05"},
    8: {"bp": "97.97 ± 0.02", "cff": "95.60 ± 0.02", "tree": "97.92 ± 0.09"},
    16: {"bp": "11.35 ± 0.00", "cff": "95.60 ± 0.03", "tree": "97.53 ± 0.03"},
}


def run(bench: BenchSettings) -> None:
    """Nine runs: N = 4, 8, 16; hidden 100; 10 epochs each."""
    finished = collect(Path(bench.runs))
    if not finished:
        raise UserError(
            f"runs={bench.runs}: holds no finished MNIST run with model.hidden={HIDDEN} "
            f"epochs={EPOCHS}; train with: {command_of(8, 'cff')}"
        )
    kept = Path(bench.out) / "baselines_mnist"
    kept.mkdir(parents=True, exist_ok=True)
    for folder, _ in finished.values():
        shutil.copyfile(folder / "summary.json", kept / f"{folder.name}.json")
    rows = [row_of(N, method, finished.get((N, method))) for N in PAPER for method in METHODS]
    notes = [*NOTES, *commands(finished)]
    write_table(bench.out, "baselines_mnist", "MNIST: BP, CFF+M, TreeProp", rows, notes)
    print(markdown(rows))


def collect(runs: Path) -> dict[tuple[int, str], tuple[Path, dict[str, Any]]]:
    """The finished runs of the table by (N, method); seed 1 only."""
    finished = {}
    for summary in sorted(runs.glob("mnist_*/summary.json")):
        settings = config.load_file(summary.parent / "config.yaml")
        facts = json.loads(summary.read_text())
        plain = (settings.model.hidden, facts["epochs"], settings.seed, settings.data.limit)
        if settings.data.name == "mnist" and plain == (HIDDEN, EPOCHS, 1, 0):
            finished[facts["N"], methods.of(settings).name] = (summary.parent, facts)
    return finished


def row_of(N: int, method: str, run: tuple[Path, dict[str, Any]] | None) -> dict[str, Any]:
    """One line; what was not run says so."""
    row: dict[str, Any] = {"layers": N, "method": METHODS[method]}
    paper = {"paper, 100 epochs (%)": PAPER[N][method]}
    columns = (
        "test (%)", "validation (%)", "trained", "deployed", "applications per step",
        "samples seen", "seconds", "run",
    )  # fmt: skip
    if run is None:
        return {**row, "test (%)": "not run", **paper, **dict.fromkeys(columns[1:], "")}
    folder, facts = run
    scores = facts["final"]
    return {
        **row,
        "test (%)": f"{100 * scores['test']['full']['accuracy']:.2f}",
        **paper,
        "validation (%)": f"{100 * scores['validation']['full']['accuracy']:.2f}",
        "trained": facts["parameters_trained"],
        "deployed": facts["parameters_deployed"],
        "applications per step": facts["block_applications_per_step"],
        "samples seen": facts["samples_seen"],
        "seconds": round(facts["wall_seconds"]),
        "run": f"[{folder.name}](baselines_mnist/{folder.name}.json)",
    }


def command_of(N: int, method: str) -> str:
    """The train command of a line."""
    depth = (N - 1).bit_length()
    chosen = "" if method == "tree" else f" method={method}"
    return (
        f"python -m treeprop_ray.train experiment=mnist_d{depth}{chosen} "
        f"model.hidden={HIDDEN} epochs={EPOCHS}"
    )


def commands(finished: Mapping[tuple[int, str], Any]) -> list[str]:
    """The commands of the runs, as their own summaries have them."""
    lines = [facts["command"] for _, facts in finished.values()]
    return ["", "Commands of the runs:", "", "```", *lines, "```"]


NOTES = [
    "Sigmoid MLPs, hidden 100, complete MNIST (54,000 training images, 6,000 held out, 10,000 test "
    "images), batch 64, 10 epochs, one seed (1), no augmentation, one torch thread; top-1 of the "
    "full chain after the last step. The paper's column is for 100 epochs (CFF+M: 500 + 100) and "
    "several seeds: not the same amount of training.",
    "",
    "Each method has 10 epochs in all. For CFF+M the last sixth of the steps trains the head on "
    "frozen layers, as in 100 of 600 epochs; both its views are the same picture here, since MNIST "
    "is not augmented. Applications per step count forwards of a block on the batch, each with one "
    "backward (CFF+M: its first stage, two views). Seconds were taken on a machine with other work "
    "and are no comparison.",
]
