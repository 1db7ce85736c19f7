"""Runs as rows: from run folders to <sweep>.csv and back. A row holds all that a table needs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeprop_ray import methods
from treeprop_ray.config import Settings, dotted
from treeprop_ray.errors import UserError
from treeprop_ray.run.files import write_whole
from treeprop_ray.sweep.plan import (
    FAILED,
    FINISHED,
    STOPPED,
    Sweep,
    Trial,
    past_trials,
    read_json,
)
from treeprop_ray.sweep.population import Population
from treeprop_ray.sweep.space import OTHERS, show

Row = dict[str, str]  # as in the file: everything is text
FIRST = ["run", "status", "protocol", "epochs", "seed"]
LAST = [
    "wall_seconds", "commit", "date", "cores", "cpu", "gpus", "torch", "ray", "data", "base",
    "error", "population", "sweep_command", "command",
]  # fmt: skip


def flat(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a run: <split>/<path>/<kind>, leak, correction_ratio, parameters_deployed.

    The path `spine` is the longest one along the spine. work and critical_path are those of the
    mean step, in layers.

    best/full/<kind> is of the test split too, at the epoch with the best validation score. With
    eval_test=true there are highest/full/<kind>, the best test score, and late/full/<kind>, the
    mean of the last ten.
    """
    figures: dict[str, float] = {}
    for split, by_path in summary["final"].items():
        named = dict(by_path)
        if spines := [path for path in by_path if path.startswith("spine-")]:
            named["spine"] = by_path[max(spines, key=lambda name: int(name.partition("-")[2]))]
        for path, score in named.items():
            figures.update({f"{split}/{path}/{kind}": value for kind, value in score.items()})
    best = summary.get("best_validation", {}).get("test", {})
    figures.update({f"best/full/{kind}": value for kind, value in best.items()})
    for name, score in summary.get("test_by_epoch", {}).items():
        figures.update({f"{name}/full/{k}": v for k, v in score.items() if k != "epoch"})
    for name in ("leak", "correction_ratio"):
        if summary.get(name) is not None:
            figures[name] = summary[name]
    figures.update(summary.get("cost", {}))
    figures["parameters_deployed"] = summary["parameters_deployed"]
    return figures


def spine_layers(settings: Settings) -> dict[str, float]:
    """Layers before the head of the longest path along the spine, where one is trained and the
    network is a shipped one."""
    method = methods.of(settings)
    if dotted(settings.model.name) or not method.short_paths:
        return {}
    tree = method.tree(settings)
    return {"spine_layers": float(method.outline(settings, tree).blocks(tree.spine_paths[-1]))}


def value_of(metric: str, figures: Mapping[str, Any]) -> float | None:
    """A metric from a run's figures; perplexity comes from the loss."""
    if metric.endswith("/perplexity") and metric not in figures:
        loss = figures.get(metric.replace("/perplexity", "/loss"))
        return None if loss is None else math.exp(min(float(loss), 700.0))
    return float(figures[metric]) if metric in figures else None


def figure(metric: str, value: float) -> str:
    """How a figure is shown: accuracies in percent."""
    if metric.endswith("/accuracy"):
        return f"{100 * value:.2f}"
    if metric == "correction_ratio":
        return f"{value:.2g}"
    if metric in ("work", "critical_path", "spine_layers"):
        return f"{value:g}"
    return f"{value:,.0f}" if metric.startswith("parameters") else f"{value:.3f}"


def row_of(trial: Trial, sweep: Sweep) -> Row | None:
    """A trial's row; None while it has not come to an end."""
    state = trial.state()
    if state not in (FINISHED, STOPPED, FAILED):
        return None
    row: dict[str, Any] = {
        "run": f"{sweep.name}/{trial.settings.name}",
        "status": state,
        "protocol": trial.protocol,
        "epochs": trial.settings.epochs,
        "seed": trial.seed,
        **{k: show(v) for k, v in trial.point.items()},
        "base": trial.settings.experiment,
        "data": trial.settings.data.name,
        "sweep_command": sweep.command,
        "command": trial.command,
    }
    if sweep.population and (story := Population.of(sweep).story(trial.settings.name)):
        row["population"] = story
    if state == FINISHED:
        summary = read_json(trial.folder / "summary.json") or {}
        row.update({k: repr(v) for k, v in flat(summary).items()})
        if "spine_layers" in sweep.space.table.values.values():
            row.update(spine_layers(trial.settings))
        hardware, versions = summary["hardware"], summary["versions"]
        row.update(
            epochs=show(float(summary["epochs"])),
            wall_seconds=summary["wall_seconds"],
            commit=summary["commit"],
            date=summary["date"],
            cores=hardware["cores"],
            cpu=hardware["cpu"],
            gpus=", ".join(hardware["gpus"]),
            torch=versions["torch"],
            ray=versions["ray"],
        )
        if samples := summary.get("samples"):  # a subset has the name of the whole
            row["data"] += f" ({samples['train']:,} training, {samples['test']:,} test samples)"
    elif state == STOPPED:
        stopped = read_json(trial.folder / "stopped.json") or {}
        row["epochs"] = stopped.get("epoch", 0)
        if stopped.get("score") is not None:  # what the scheduler judged by
            row[f"validation/{sweep.space.metric.partition('/')[2]}"] = repr(stopped["score"])
    else:
        row["error"] = trial.error_file.read_text()
    return {k: str(v) for k, v in row.items() if str(v)}


def rows_of(sweep: Sweep) -> list[Row]:
    """The rows of a sweep's trials that have come to an end."""
    trials = list(sweep.trials()) if sweep.points != () else past_trials(sweep)
    return [row for trial in trials if (row := row_of(trial, sweep)) is not None]


def merge(stored: Sequence[Row], ended: Sequence[Row]) -> list[Row]:
    """Stored rows, with those found in run folders in their place or behind them."""
    fresh = {row["run"]: row for row in ended}
    kept = [fresh.pop(row["run"], row) for row in stored]
    return [*kept, *fresh.values()]


def read_rows(path: Path) -> list[Row]:
    """The rows of a stored CSV; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as f:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(f)]
    for row in rows:
        if not {"run", "sweep_command", "status", "protocol"} <= row.keys():
            raise UserError(f"{path}: is not a table of runs that `report` has written")
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """One line per run; written aside and renamed."""
    between = sorted({k for row in rows for k in row} - {*FIRST, *LAST}, key=_order)
    aside = path.with_suffix(".csv.tmp")
    with aside.open("w", newline="") as f:
        writer = csv.DictWriter(f, [*FIRST, *between, *LAST], restval="")
        writer.writeheader()
        writer.writerows(rows)
    aside.replace(path)


def _order(key: str) -> tuple[int, str]:
    """Axes, then test, then validation figures, then the rest."""
    head = key.partition("/")[0]
    return ({"test": 1, "validation": 2}.get(head, 3) if "/" in key else _plain(key), key)


def _plain(key: str) -> int:
    return 3 if key in OTHERS else 0


def command_log(folder: Path) -> list[str]:
    """The tune commands that a sweep's folder has seen, oldest first."""
    log = read_json(folder / "commands.json") or {}
    commands = log.get("commands", [])
    if not isinstance(commands, list) or not all(isinstance(c, str) for c in commands):
        raise UserError(f"{folder / 'commands.json'}: is damaged: commands must be a list of texts")
    return commands


def log_command(folder: Path, command: str) -> None:
    """Note a tune command, so that `report` knows which runs belong together."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [c for c in command_log(folder) if c != command]
    log = json.dumps({"commands": [*known, command]}, indent=2)
    write_whole(folder / "commands.json", log)
