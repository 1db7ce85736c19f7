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

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeprop_ray import cli, config
from treeprop_ray.config import Settings, opt
from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from treeprop_ray.data import DataSet
    from treeprop_ray.inference.paths import Network


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
    if settings.mode == "adaptive":
        from treeprop_ray.inference.adaptive import thresholds_of

        thresholds_of(settings.threshold)
    return settings


def run(settings: EvaluateSettings) -> None:
    """The evaluate command."""
    from treeprop_ray.inference.paths import as_path_text, parse_path, score_network
    from treeprop_ray.run.reading import open_run
    from treeprop_ray.train import outline_of, table_of

    of_run, samples, point, network = open_run(
        settings.run, settings.checkpoint, settings.data_root
    )
    if settings.mode == "adaptive":
        print(f"{point.path}\n{adaptive(settings, of_run, network, samples)}")
        return
    text = as_path_text(settings.path)
    outline = outline_of(of_run, network.tree)
    paths = outline.paths
    if text != "all":
        paths = {text if text in paths else "path": parse_path(text, outline, of_run.method)}
    scores = score_network(network, paths, samples.batches(settings.split))
    print(f"{point.path}\n{table_of(outline, paths, {settings.split: scores})}")


def adaptive(
    settings: EvaluateSettings, of_run: Settings, network: Network, samples: DataSet
) -> str:
    """The table of mode=adaptive; draws its figure."""
    from treeprop_ray.inference import adaptive
    from treeprop_ray.reporting.adaptive import draw, write

    tree = adaptive.with_exits(network, of_run)
    exits = adaptive.look(tree, samples.batches(settings.split))
    points = [adaptive.at_threshold(exits, t) for t in adaptive.thresholds_of(settings.threshold)]
    fixed = adaptive.fixed_paths(exits, tree.tree.named_paths)
    figure = Path(settings.run) / "figures" / "adaptive.png"
    figure.parent.mkdir(exist_ok=True)
    draw(points, fixed, settings.split, figure)
    if settings.out:
        write(settings.run, settings.out, settings.split, points, fixed, figure)
    return f"{adaptive.table_of(points, exits.names)}\nfigure: {figure}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.evaluate`."""
    return cli.main(__doc__ or "", EvaluateSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
