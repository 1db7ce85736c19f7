"""A table of finished runs, with a copy of their summaries: what the compare command writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from treeprop_ray import config
from treeprop_ray.config import RESUMABLE, Settings
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.tables import markdown
from treeprop_ray.run.folder import read_summary, run_settings

# said in a column of its own, or about where and how a run was made
SAID = {"method"} | (RESUMABLE - {"epochs", "steps"})


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: str) -> Finished:
        """Settings and summary of a run folder."""
        settings = run_settings(folder)
        path = Path(folder) / "summary.json"
        if not path.is_file():
            raise UserError(f"runs={folder}: the run is not finished (no summary.json)")
        values = {key: config.hidden(value) for key, _, value in config.walk(settings)}
        summary = read_summary(Path(folder))
        if "/" in summary["name"] or summary["name"] in ("", ".", ".."):
            raise UserError(f"{path}: is damaged: name={summary['name']} is no folder name")
        return cls(Path(folder), values, summary)

    def differences(self) -> str:
        """The settings in which the run differs from its experiment."""
        base = config.load([f"experiment={self.settings['experiment']}"])
        plain = {key: value for key, _, value in config.walk(base)}
        changed = {k: v for k, v in self.settings.items() if v != plain[k] and k not in SAID}
        return " ".join(f"{k}={str(v).lower()}" for k, v in changed.items())

    def command(self) -> str:
        """A command that gives this run's settings today, whatever the experiment said then."""
        words = [f"experiment={self.settings['experiment']}"]
        if (method := self.settings["method"]) != Settings().method:
            words.append(f"method={method}")
        return " ".join(["python -m treeprop_ray.train", *words, self.differences()]).strip()


def figure_of(score: dict[str, float]) -> tuple[str, float]:
    """What a score is compared by, and its value."""
    if "perplexity" in score:
        return "perplexity of text", score["perplexity"]
    if "accuracy" in score:
        return "accuracy in %", 100 * score["accuracy"]
    return "mean loss", score["loss"]


def row_of(run: Finished, split: str) -> dict[str, Any]:
    """One line of the table."""
    s = run.summary
    scores = {path: figure_of(score)[1] for path, score in s["final"][split].items()}
    short = [f"{path} {value:.2f}" for path, value in scores.items() if path != "full"]
    cells = {
        "experiment": run.settings["experiment"],
        "method": {"tree": "TreeProp", "bp": "BP"}.get(s["method"], s["method"]),
        "other settings": run.differences() or "-",
        "epochs": f"{s['epochs']:g}",
        "parameters": f"{s['parameters_deployed']:,}",
        "full chain": f"{scores['full']:.2f}",
        "short paths": ", ".join(short) or "-",
        "minutes": f"{s['wall_seconds'] / 60:.1f}",
    }
    return {key: plain(text) for key, text in cells.items()}


def plain(text: str) -> str:
    """A text out of somebody's file that a reader of markdown shows as it stands."""
    text = escape(text, quote=False).replace("|", "&#124;").replace("`", "&#96;")
    return "".join(c if c.isprintable() else " " for c in text)


def write(folders: Sequence[str], to: str, title: str, note: str, split: str) -> str:
    """<to>.md and the summaries in <to>/; returns the table as text."""
    runs = [Finished.read(folder) for folder in folders]
    names = [r.summary["name"] for r in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"runs={twice[0]}: given twice")
    kinds = dict.fromkeys(figure_of(r.summary["final"][split]["full"])[0] for r in runs)
    kind = ", ".join(kinds)
    if not any("accuracy" in word for word in kinds) and len(kinds) == 1:
        kind = f"{kind.removesuffix(' of text')}, lower is better"
    table = markdown([row_of(r, split) for r in runs])
    folder, page = Path(to), Path(f"{to}.md")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# {title}", "", *([note, ""] if note else []),
        f"Score on the {split} split ({kind}) after the last step. Minutes are wall time of "
        "training and evaluation on a machine that did other work as well.", "", table, "",
        "Commands, in the order of the table:", "", "```",
        *(r.command().replace("`", "'") for r in runs), "```", "",
        "Each run's own summary with versions and hardware:", "",
    ]  # fmt: skip
    for r, name in zip(runs, names, strict=True):
        copy = {**r.summary, "command": r.command()}
        (folder / f"{name}.json").write_text(json.dumps(copy, indent=2) + "\n")
        about, hardware = r.summary, r.summary["hardware"]
        made = f"commit {about['commit']}, {about['date']}, {hardware.get('cpu', '')}"
        lines.append(
            f"- [{plain(name)}]({folder.name}/{quote(name)}.json): {plain(made)}, "
            f"seed {about['seed']}"
        )
    page.write_text("\n".join(lines) + "\n")
    return f"{table}\nwrote {page}"
