"""One run as one HTML page that needs nothing beside it: figures are inside, there is no script."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from treeprop_ray import config, methods
from treeprop_ray.config import RESUMABLE, Settings
from treeprop_ray.core.rule import Rule
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.hosts.probe_row import WHOLE
from treeprop_ray.reporting.figures import schedule
from treeprop_ray.reporting.plot import plt
from treeprop_ray.reporting.templates import render
from treeprop_ray.run.folder import read_summary, run_settings

DRAWN = 40  # largest N whose schedule is still legible
# file in figures/ -> what a reader should see in it
FIGURES = {
    "path_accuracy": "Accuracy of every path on the validation split, after each epoch.",
    "tree_loss": "Loss of each node at the last logged step.",
    "depth_loss": "Loss of each depth of the time tree over the steps.",
    "adaptive": "Samples that stop early: accuracy against blocks run.",
    "probe_alignment": "Left: cosine between the update and the true gradient of the deployed "
    "chain on held-out batches; above 0 the update goes downhill. Right: norms.",
    "probe_blocks": "The same cosine for each block of the chain. Where the true gradient has "
    "vanished (deep sigmoid chains) the cosine of a block says little.",
    "probe_kl": "KL between each state's factor and the chain's own transition into it.",
    "probe_tree": "The same KL at the last probe, on the tree.",
    "probe_bound": "The variational bound F, its cross-entropy part and the likelihood.",
    "probe_leak": "Label leak: what the tree predicts better than the clean path can.",
    "waves": "One training step: which actor worked when, with the level in the box.",
    "schedule": "One training step as scheduled with an actor per node: who works in which wave.",
}


@dataclass(frozen=True)
class Table:
    """Plain cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG inside the page."""

    name: str
    data: str  # base64
    caption: str


def write_page(run: str, target: Path | None = None) -> Path:
    """Write <run>/report.html (or `target`) and return its path."""
    settings, folder = run_settings(run), Path(run)
    if not (folder / "metrics.csv").is_file():
        raise UserError(
            f"run={run}: has no metrics.csv; it has not taken a step yet, or loggers= left it out"
        )
    target = target or folder / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(html_of(settings, folder), encoding="utf-8")
    except OSError as e:
        raise UserError(f"to={target}: cannot write there: {e.strerror}") from e
    return target


def html_of(settings: Settings, folder: Path) -> str:
    """The whole page as text."""
    stored = folder / "summary.json"
    summary = read_summary(folder) if stored.is_file() else None
    return render(
        "report.html",
        name=folder.resolve().name,
        subtitle=subtitle(settings, summary),
        scores=accuracy(summary) if summary else None,
        probe=probed(folder),
        pictures=figures(settings, summary, folder),
        command=command(settings, summary),
        origin=origin(summary) if summary else "",
        changed=Table(["key", "value"], [[key, str(value)] for key, value in changed(settings)]),
        settings=config.to_yaml(settings),
    )


def subtitle(settings: Settings, summary: dict[str, Any] | None) -> str:
    """What kind of run it is, and whether it is finished."""
    kind = f"{settings.model.name} on {settings.data.name}, method={methods.of(settings).name}"
    if summary is None:
        return f"{kind}. The run is not finished."
    deployed, trained = summary["parameters_deployed"], summary["parameters_trained"]
    size = f"{deployed:,} parameters deployed of {trained:,} trained"
    return (
        f"{kind}, engine={summary['engine']}, N={summary['N']}, depth {summary['depth']}; {size}; "
        f"{summary['steps']} steps, {summary['wall_seconds']:.0f} s."
    )


def accuracy(summary: dict[str, Any]) -> Table:
    """Accuracy and loss of every path on both splits."""
    splits = list(summary["final"])
    paths = summary["final"][splits[0]]
    kinds = sorted(next(iter(paths.values())))  # accuracy, loss, and what else a model is scored by
    head = ["path", *(f"{split} {kind}" for kind in kinds for split in splits)]
    rows = []
    for path in paths:
        cells = [(kind, summary["final"][split][path][kind]) for kind in kinds for split in splits]
        shown = [f"{100 * v:.2f} %" if kind == "accuracy" else f"{v:.4f}" for kind, v in cells]
        rows.append([path, *shown])
    return Table(head, rows)


def probed(folder: Path) -> Table | None:
    """First and last row of probe.csv, side by side."""
    path = folder / "probe.csv"
    rows = pd.read_csv(path) if path.is_file() else None
    if rows is None or rows.empty:
        return None
    first, last = rows.iloc[0], rows.iloc[-1]
    shown = [c for c in rows.columns if c in WHOLE or c.startswith("leak/")]
    lines = [
        [c, f"{first[c]:.4g}", f"{last[c]:.4g}"]
        for c in shown
        if pd.notna(first[c]) or pd.notna(last[c])
    ]
    return Table(
        ["on held-out batches", f"step {int(first.step)}", f"step {int(last.step)}"], lines
    )


def figures(settings: Settings, summary: dict[str, Any] | None, folder: Path) -> list[Picture]:
    """The figures of the run folder, and the schedule where no actors were timed."""
    pictures = {p.stem: p.read_bytes() for p in (folder / "figures").glob("*.png")}
    method = methods.of(settings)
    over_blocks = method.short_paths and not method.over_time
    if "waves" not in pictures and over_blocks and summary and summary["N"] <= DRAWN:
        pictures["schedule"] = schedule_picture(settings, summary["N"])
    known = [name for name in FIGURES if name in pictures]
    others = sorted(set(pictures) - set(known))
    return [
        Picture(name, base64.b64encode(pictures[name]).decode(), FIGURES.get(name, name))
        for name in [*known, *others]
    ]


def schedule_picture(settings: Settings, N: int) -> bytes:
    """The waves of one step with an actor per node, as a PNG."""
    fig = schedule(Tree(N, settings.split), Rule.of(settings, config.family_of(settings)))
    out = io.BytesIO()
    fig.savefig(out, format="png", dpi=110)
    plt.close(fig)
    return out.getvalue()


def command(settings: Settings, summary: dict[str, Any] | None) -> str:
    """What made the run, or would."""
    if summary is None:
        words = " ".join(f"{k}={v}" for k, v in changed(settings))
        return f"python -m treeprop_ray.train {words}"
    return str(summary["command"])


def origin(summary: dict[str, Any]) -> str:
    """Commit, versions and hardware."""
    hardware = summary["hardware"]
    versions = ", ".join(f"{k} {v}" for k, v in summary["versions"].items())
    return (
        f"Commit {summary['commit']}, {summary['date']}; {hardware['cores']} cores, "
        f"{hardware['cpu']}; {versions}."
    )


def changed(settings: Settings) -> list[tuple[str, Any]]:
    """Settings that differ from the defaults and change what is computed."""
    defaults = {key: value for key, _, value in config.walk(Settings())}
    moving = RESUMABLE - {"experiment", "epochs", "steps", "engine", "placement", "hosts"}
    return [
        (key, value)
        for key, _, value in config.walk(settings)
        if value != defaults[key] and key not in moving
    ]
