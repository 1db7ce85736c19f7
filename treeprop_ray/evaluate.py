"""Accuracy (text: perplexity) of the full chain, the spine paths, or any path of a trained tree.

python -m treeprop_ray.evaluate run=results/runs/<name>
python -m treeprop_ray.evaluate run=results/runs/<name> path=[0,4,6,8] split=validation
python -m treeprop_ray.evaluate run=results/runs/<name> mode=adaptive threshold=[0.5,0.9,1]

mode=adaptive sends every sample along the spine, shortest path first, until the softmax maximum
reaches the threshold (last resort: the full chain), prints accuracy against blocks run (a sample
that needs the full chain has run the spine as well) and draws figures/adaptive.png in the run
folder; with out=results the table and the figure are written there too, as adaptive.*.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeprop_ray import cli, config
from treeprop_ray.config import opt
from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from treeprop_ray.core.network import TreeNetwork
    from treeprop_ray.data import DataSet
    from treeprop_ray.inference.adaptive import Point

THRESHOLDS = [0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0]


@dataclass
class EvaluateSettings:
    """Settings of the evaluate command."""

    run: str = opt("", "run folder, e.g. results/runs/<name>")
    checkpoint: str = opt("last", "last, best or a step number")
    mode: str = opt(
        "paths", "score whole paths, or let samples stop early", choices=["paths", "adaptive"]
    )
    threshold: Any = opt(
        None, "adaptive: softmax maximum at which a sample stops, a number or a list; default 0 … 1"
    )
    out: str = opt("", "adaptive: folder for the table and figure, e.g. results; default: none")
    path: Any = opt("all", "all, full, spine-k, or indices such as [0,4,6,7,8]")
    split: str = opt("test", "which split", choices=["train", "validation", "test"])
    data_root: str | None = opt(None, "hub folder, if it has moved since the run")


def load(words: Sequence[str]) -> EvaluateSettings:
    """Settings from command-line words."""
    settings: EvaluateSettings = config.merge(EvaluateSettings, ("", config.parse_overrides(words)))
    if settings.mode != "adaptive" and settings.threshold is not None:
        raise UserError(f"threshold={settings.threshold}: belongs to mode=adaptive")
    if settings.mode != "adaptive" and settings.out:
        raise UserError(f"out={settings.out}: belongs to mode=adaptive")
    if settings.mode == "adaptive" and settings.path != "all":
        raise UserError(f"path={settings.path}: mode=adaptive goes along the spine; leave path=all")
    thresholds_of(settings.threshold)
    return settings


def thresholds_of(given: Any) -> list[float]:
    """A number or a list of numbers in [0, 1]; None is the default list."""
    values = THRESHOLDS if given is None else given if isinstance(given, list) else [given]
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= 1:
            raise UserError(f"threshold={given}: a number in [0, 1], or a list such as [0.5,0.9,1]")
    if not values:
        raise UserError("threshold=[]: at least one number in [0, 1]")
    return sorted({float(value) for value in values})


def run(settings: EvaluateSettings) -> None:
    """The evaluate command."""
    from treeprop_ray.core.network import TreeNetwork
    from treeprop_ray.engine.base import score_network
    from treeprop_ray.run.reading import as_path_text, open_run, parse_path
    from treeprop_ray.train import outline_of, table_of

    opened = open_run(settings.run, settings.checkpoint, settings.data_root)
    of_run, samples, found, network = opened
    if settings.mode == "adaptive":
        if of_run.method != "tree" or not isinstance(network, TreeNetwork):
            kind = f"method={of_run.method} model.name={of_run.model.name}"
            raise UserError(f"mode=adaptive: a run with {kind} has no short paths")
        if of_run.model.name == "gpt":
            raise UserError(
                "mode=adaptive: a token that stops early leaves no state for later tokens to "
                "attend to; use path=all, or generate with draft="
            )
        print(f"{found.path}\n{adaptive(settings, network, samples)}")
        return
    text = as_path_text(settings.path)
    outline = outline_of(of_run, network.tree)
    paths = outline.paths
    if text != "all":
        paths = {text if text in paths else "path": parse_path(text, outline, of_run.method)}
    scores = score_network(network, paths, samples.batches(settings.split))
    print(f"{found.path}\n{table_of(outline, paths, {settings.split: scores})}")


def adaptive(settings: EvaluateSettings, network: TreeNetwork, samples: DataSet) -> str:
    """The table of mode=adaptive; draws its figure."""
    from treeprop_ray.inference.adaptive import at_threshold, fixed_paths, look, table_of
    from treeprop_ray.reporting import figures

    exits = look(network, samples.batches(settings.split))
    points = [at_threshold(exits, t) for t in thresholds_of(settings.threshold)]
    target = Path(settings.run) / "figures" / "adaptive.png"
    target.parent.mkdir(exist_ok=True)
    fixed = fixed_paths(exits, network.tree.named_paths)
    figures.adaptive(points, fixed, settings.split, target)
    if settings.out:
        store(settings, points, fixed, exits.names, target)
    return f"{table_of(points, exits.names)}\nfigure: {target}"


def store(
    settings: EvaluateSettings,
    points: Sequence[Point],
    fixed: Mapping[str, tuple[int, float]],
    names: Sequence[str],
    figure: Path,
) -> None:
    """<out>/adaptive.md, .csv and .png, with the run's own command and commit."""
    from treeprop_ray.reporting.tables import write_table

    summary = Path(settings.run) / "summary.json"
    if not summary.is_file():
        raise UserError(f"out={settings.out}: run={settings.run} is not finished")
    of_run = json.loads(summary.read_text())
    rows = [
        {
            "threshold": f"{p.threshold:g}",
            "accuracy (%)": 100 * p.accuracy,
            "blocks run (mean)": p.blocks,
            **{f"leave at {n} (%)": 100 * x for n, x in zip(names, p.left_at, strict=True)},
        }
        for p in points
    ]
    one = ", ".join(f"{n} {100 * right:.2f} % ({blocks})" for n, (blocks, right) in fixed.items())
    samples = of_run["samples"]
    notes = [
        f"Every sample on one path (blocks): {one}.",
        f"Split {settings.split} of {of_run['data']} ({samples['train']:,} training, "
        f"{samples['test']:,} test samples), seed {of_run['seed']}, {of_run['epochs']:g} epochs.  ",
        f"Run: `{of_run['command']}`, commit {of_run['commit']}.", "",
        "![accuracy over blocks](adaptive.png)",
    ]  # fmt: skip
    title = "Adaptive inference: samples stop on the spine when the softmax is confident"
    write_table(settings.out, "adaptive", title, rows, notes)
    shutil.copy(figure, Path(settings.out) / "adaptive.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.evaluate`."""
    return cli.main(__doc__ or "", EvaluateSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
