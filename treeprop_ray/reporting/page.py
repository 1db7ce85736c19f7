"""One run as one HTML page that needs nothing beside it: figures are inside, there is no script."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
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
from treeprop_ray.run.folder import read_summary, run_settings

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; text-align: right; }
th { border-bottom: 1px solid #999; } td:first-child, th:first-child { text-align: left; }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; font-size: 13px; }
figure { margin: 1.2rem 0; } figcaption { color: #555; font-size: 14px; } img { max-width: 100%; }
"""

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
    name = escape(folder.resolve().name)
    parts = [
        f"<h1>{name}</h1>",
        f"<p>{escape(subtitle(settings, summary))}</p>",
        "<h2>Accuracy per path</h2>",
        accuracy(summary),
        *probe_section(folder),
        "<h2>Figures</h2>",
        *figures(settings, summary, folder),
        "<h2>How to reproduce it</h2>",
        reproduce(settings, summary),
        "<h2>Settings</h2>",
        changed_settings(settings),
        "<details><summary>all of them</summary>",
        f"<pre>{escape(config.to_yaml(settings))}</pre></details>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{name}</title><style>{STYLE}</style></head>\n'
        "<body>\n" + "\n".join(parts) + "\n</body></html>\n"
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


def accuracy(summary: dict[str, Any] | None) -> str:
    """Accuracy and loss of every path on both splits."""
    if summary is None:
        return "<p>The run is not finished; see the figure of validation accuracies.</p>"
    splits = list(summary["final"])
    paths = summary["final"][splits[0]]
    kinds = sorted(next(iter(paths.values())))  # accuracy, loss, and what else a model is scored by
    head = ["path", *(f"{split} {kind}" for kind in kinds for split in splits)]
    rows = []
    for path in paths:
        cells = [(kind, summary["final"][split][path][kind]) for kind in kinds for split in splits]
        shown = [f"{100 * v:.2f} %" if kind == "accuracy" else f"{v:.4f}" for kind, v in cells]
        rows.append([path, *shown])
    return table(head, rows)


def probe_section(folder: Path) -> list[str]:
    """First and last row of probe.csv, side by side."""
    path = folder / "probe.csv"
    rows = pd.read_csv(path) if path.is_file() else None
    if rows is None or rows.empty:
        return []
    first, last = rows.iloc[0], rows.iloc[-1]
    shown = [c for c in rows.columns if c in WHOLE or c.startswith("leak/")]
    lines = [
        [c, f"{first[c]:.4g}", f"{last[c]:.4g}"]
        for c in shown
        if pd.notna(first[c]) or pd.notna(last[c])
    ]
    head = ["on held-out batches", f"step {int(first.step)}", f"step {int(last.step)}"]
    return ["<h2>Does the update point downhill?</h2>", table(head, lines)]


def figures(settings: Settings, summary: dict[str, Any] | None, folder: Path) -> list[str]:
    """The figures of the run folder, and the schedule where no actors were timed."""
    pictures = {p.stem: p.read_bytes() for p in (folder / "figures").glob("*.png")}
    method = methods.of(settings)
    over_blocks = method.short_paths and not method.over_time
    if "waves" not in pictures and over_blocks and summary and summary["N"] <= DRAWN:
        pictures["schedule"] = schedule_picture(settings, summary["N"])
    known = [name for name in FIGURES if name in pictures]
    others = sorted(set(pictures) - set(known))
    return [figure(name, pictures[name], FIGURES.get(name, name)) for name in [*known, *others]]


def figure(name: str, png: bytes, caption: str) -> str:
    """A picture inside the page."""
    data = base64.b64encode(png).decode()
    return (
        f'<figure id="{escape(name)}"><img alt="{escape(name)}" '
        f'src="data:image/png;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def schedule_picture(settings: Settings, N: int) -> bytes:
    """The waves of one step with an actor per node, as a PNG."""
    fig = schedule(Tree(N, settings.split), Rule.of(settings, config.family_of(settings)))
    out = io.BytesIO()
    fig.savefig(out, format="png", dpi=110)
    plt.close(fig)
    return out.getvalue()


def reproduce(settings: Settings, summary: dict[str, Any] | None) -> str:
    """Command, commit, versions and hardware."""
    if summary is None:
        words = " ".join(f"{k}={v}" for k, v in changed(settings))
        return f"<pre>{escape(f'python -m treeprop_ray.train {words}')}</pre>"
    hardware = summary["hardware"]
    versions = ", ".join(f"{k} {v}" for k, v in summary["versions"].items())
    about = f"Commit {summary['commit']}, {summary['date']}; {hardware['cores']} cores, "
    about += f"{hardware['cpu']}; {versions}."
    return f"<pre>{escape(summary['command'])}</pre><p>{escape(about)}</p>"


def changed(settings: Settings) -> list[tuple[str, Any]]:
    """Settings that differ from the defaults and change what is computed."""
    defaults = {key: value for key, _, value in config.walk(Settings())}
    moving = RESUMABLE - {"experiment", "epochs", "steps", "engine", "placement", "hosts"}
    return [
        (key, value)
        for key, _, value in config.walk(settings)
        if value != defaults[key] and key not in moving
    ]


def changed_settings(settings: Settings) -> str:
    """The settings that differ from the defaults, as a table."""
    rows = [[key, str(value)] for key, value in changed(settings)]
    return table(["key", "value"], rows) if rows else "<p>All settings are the defaults.</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain cells as an HTML table."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>\n{body}\n</tbody></table>"
