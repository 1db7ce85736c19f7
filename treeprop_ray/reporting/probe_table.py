"""results/probe.md: what the probe found in some runs, with their commands; results/probe_list.md:
many runs, a line each."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.reporting.page import changed
from treeprop_ray.reporting.probe_figures import draw
from treeprop_ray.reporting.tables import markdown
from treeprop_ray.run.folder import read_summary, run_settings

SHOWN = ["cosine", "norm_bp", "norm_tree", "norm_bias", "kl", "F_mean", "F", "nll", "gap"]
FIGURES = ["probe_alignment", "probe_blocks", "probe_kl", "probe_tree", "probe_bound", "probe_leak"]
ROWS = 12  # of a table; the CSV beside it has all
LAST_LINE = "This file:"


def write(runs: Sequence[str], out: str, keep: Sequence[str] = ()) -> Path:
    """Write <out>/probe.md, and csv and figures of each run to <out>/probe/.

    Sections named in `keep` stay as the file has them: their run folders may be gone.
    """
    probed = [read(run) for run in runs]
    target, folder = Path(out) / "probe.md", Path(out) / "probe"
    before = stored_sections(target)
    if missing := [name for name in keep if name not in before]:
        raise UserError(f"keep={missing[0]}: {target} has the sections {', '.join(before) or '-'}")
    folder.mkdir(parents=True, exist_ok=True)
    sections = [before[name] for name in keep]
    sections += [section(run, summary, rows, folder) for run, summary, rows in probed]
    kept = f"keep=[{','.join(keep)}] " if keep else ""
    lines = [
        "# The probe on real runs",
        "",
        "Rows are measured during training on held-out batches, without changing the run. "
        "`cosine`: between the true gradient g of the deployed chain (backpropagation) and the "
        "TreeProp update g_hat, over the chain's parameters; `norm_*`: |g|, |g_hat|, |b| with "
        "b = g_hat - g; `kl`: divergence of the states' factors from the chain's transitions, "
        "summed over the states; `F_mean`: that plus the cross-entropy at the finest spine node, "
        "the bound at the means that training passes on; `F`, `nll`, `gap`: the bound by draws, "
        "-log p(y|x) by importance sampling, their difference; `leak`: cross-entropy of the clean "
        "spine path minus that of the tree at the finest spine node. Nats per label. "
        "`treeprop_ray/hosts/probe_row.py` defines every column.",
        "",
        *sections,
        f"{LAST_LINE} `python -m treeprop_ray.probe mode=table {kept}run=[{','.join(runs)}] "
        f"out={out}`",
    ]
    target.write_text("\n".join(lines) + "\n")
    return target


def stored_sections(path: Path) -> dict[str, str]:
    """The sections of a probe.md, by name."""
    text = path.read_text() if path.is_file() else ""
    parts = text.split(f"\n{LAST_LINE}")[0].split("\n## ")[1:]
    return {part.split("\n", 1)[0]: f"## {part.rstrip()}\n" for part in parts}


def write_list(runs: Sequence[str], out: str) -> Path:
    """Write <out>/probe_list.md and .csv: a line for each run, and those of earlier runs."""
    lines = pd.DataFrame([line_of(*read(run)) for run in runs])
    target = Path(out) / "probe_list.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    stored = target.with_suffix(".csv")
    if stored.is_file():
        texts = ["run", "settings", "commit"]
        before = pd.read_csv(stored, dtype=dict.fromkeys(texts, str))
        before[texts] = before[texts].fillna("")
        lines = pd.concat([before[~before.run.isin(lines.run)], lines])
    lines.to_csv(stored, index=False)
    shown = [
        {k: f"{v:.3g}" if isinstance(v, float) else str(v) for k, v in line.items()}
        for line in lines.to_dict("records")
    ]
    text = [
        "# Many probed runs, a line each",
        "",
        "`early`, `late`: mean cosine over the first and the last third of the probes; `negative`: "
        "probes with a cosine below 0; `kl`: summed over the states, first and last probe; `clean "
        "ce`, `tree ce`: last probe, finest spine node, the difference is the leak; `full`: test "
        "score of the deployed chain. Settings are those that differ from the defaults: a run is "
        "`python -m treeprop_ray.train <settings> probe.every=…` at its commit, a line here "
        "`python -m treeprop_ray.probe mode=list run=[…]`.",
        "",
        markdown(shown),
    ]
    target.write_text("\n".join(text) + "\n")
    return target


def line_of(run: Path, summary: dict[str, Any] | None, rows: pd.DataFrame) -> dict[str, Any]:
    """A run in one line of the list."""
    clean = next(c for c in reversed(rows.columns) if c.startswith("clean_ce/"))
    first, last = rows.iloc[0], rows.iloc[-1]
    early, late = thirds(rows)
    skip = ("name", "out", "fresh", "log_every", "probe.")
    words = [f"{k}={v}" for k, v in changed(run_settings(str(run))) if not k.startswith(skip)]
    score = summary["final"]["test"]["full"] if summary else {}
    return {
        "run": run.name,
        "settings": " ".join(words),
        "probes": len(rows),
        "first": float(first.cosine),
        "early": early,
        "late": late,
        "smallest": float(rows.cosine.min()),
        "negative": int((rows.cosine < 0).sum()),
        "kl first": float(first.kl),
        "kl last": float(last.kl),
        "clean ce": float(last[clean]),
        "tree ce": float(last[clean.replace("clean", "tree")]),
        "full": float(score.get("accuracy", score.get("loss", float("nan")))),
        "commit": summary["commit"] if summary else "",
    }


def thirds(rows: pd.DataFrame) -> tuple[float, float]:
    """Mean cosine over the first and the last third of the probes."""
    third = max(1, len(rows) // 3)
    return float(rows.cosine.iloc[:third].mean()), float(rows.cosine.iloc[-third:].mean())


def read(run: str) -> tuple[Path, dict[str, Any] | None, pd.DataFrame]:
    """Summary (if the run is finished) and probes of a run."""
    folder = Path(run)
    if not (folder / "probe.csv").is_file():
        raise UserError(f"run={run}: has no probe.csv; needs a run with probe.every > 0")
    stored = folder / "summary.json"
    summary = read_summary(folder) if stored.is_file() else None
    rows = pd.read_csv(folder / "probe.csv").sort_values("step")
    if rows.empty:
        raise UserError(f"run={run}: probe.csv has no rows")
    return folder, summary, rows


def section(run: Path, summary: dict[str, Any] | None, rows: pd.DataFrame, folder: Path) -> str:
    """One run: verdict, table, figures, command."""
    name = run.name
    rows.to_csv(folder / f"{name}.csv", index=False)
    states = sum(c.startswith("kl/") for c in rows.columns)
    draw(run, Tree(states + 1, run_settings(str(run)).split))
    pictures = []
    for figure in FIGURES:
        source = run / "figures" / f"{figure}.png"
        if source.is_file():
            shutil.copyfile(source, folder / f"{name}-{figure}.png")
            pictures.append(f"![{figure}](probe/{name}-{figure}.png)")
    leak = next(c for c in reversed(rows.columns) if c.startswith("leak/"))
    shown = [c for c in SHOWN if c in rows and rows[c].notna().any()]
    keep = sorted({round(i * (len(rows) - 1) / (ROWS - 1)) for i in range(ROWS)})
    table = [
        {
            "step": int(row.step),
            **{c: f"{row[c]:.3g}" for c in shown},
            "bias < bp": "yes" if row.descent else "no",
            "leak": f"{row[leak]:.2g}",
        }
        for _, row in rows.iloc[keep].iterrows()
    ]
    lines = [
        f"## {name}", "", verdict(rows), "", markdown(table), "",
        "By chain block, at the first probe and as the mean of the last three: cosine, "
        "|g_hat| / |g|, and the block's share of |g|^2 in %.", "", markdown(by_block(rows)), "",
        f"All {len(rows)} rows: [probe/{name}.csv](probe/{name}.csv). {outcome(summary)}",
        "", *pictures, "", *origin(run, summary), "",
    ]  # fmt: skip
    return "\n".join(lines)


def by_block(rows: pd.DataFrame) -> list[dict[str, str]]:
    """What the whole cosine is made of: where the gradient is, and whether the update is there."""
    first, last = rows.iloc[0], rows.iloc[-3:].mean(numeric_only=True)
    names = [c.removeprefix("share/") for c in rows if c.startswith("share/")]
    return [
        {
            "block": name,
            **{
                f"{kind}, {when}": f"{scale * row[f'{kind}/{name}']:.2g}"
                for kind, scale in (("cosine", 1), ("ratio", 1), ("share", 100))
                for when, row in (("first", first), ("last", last))
            },
        }
        for name in names
        if rows[f"share/{name}"].notna().any()
    ]


def outcome(summary: dict[str, Any] | None) -> str:
    """How the run ended."""
    if summary is None:
        return "The run was stopped before its end: there are no test scores."
    final = summary["final"]["test"]
    kind = next(k for k in ("perplexity", "accuracy", "loss") if k in final["full"])
    shown_as = "{:.2%}" if kind == "accuracy" else "{:.3f}"
    paths = ", ".join(f"{path} {shown_as.format(v[kind])}" for path, v in final.items())
    return f"Test {kind}: {paths}."


def origin(run: Path, summary: dict[str, Any] | None) -> list[str]:
    """Command, commit and hardware; a stopped run has left its settings only."""
    if summary is None:
        words = " ".join(f"{k}={v}" for k, v in changed(run_settings(str(run))))
        return [f"Settings that differ from the defaults: `{words}`  ", "Commit not recorded."]
    hardware = f"{summary['hardware']['cores']} cores, {summary['hardware']['cpu']}"
    return [
        f"Command: `{summary['command']}`  ",
        f"Commit {summary['commit']}, {summary['date']}, {hardware}, "
        f"torch {summary['versions']['torch']}",
    ]


def verdict(rows: pd.DataFrame) -> str:
    """The claims of the method, read off the rows."""
    first, last, cosine = rows.iloc[0], rows.iloc[-1], rows.cosine
    positive = f"positive at {int((cosine > 0).sum())} of {len(rows)} probes"
    early, late = thirds(rows)
    trend = "rises" if late > early else "does not rise"
    states = [c for c in rows.columns if c.startswith("kl/")]
    fell = sum(last[c] <= first[c] for c in states)
    return (
        f"Cosine {positive}, smallest {cosine.min():.3f}; from {first.cosine:.3f} to "
        f"{last.cosine:.3f}; it {trend} (mean of the first third {early:.3f}, of the last third "
        f"{late:.3f}). KL of {fell} of {len(states)} states is lower at the last probe than at the "
        f"first; their sum goes from {first.kl:.3g} to {last.kl:.3g}. |b| < |g| at "
        f"{int(rows.descent.sum())} of {len(rows)} probes."
    )
