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
from typing import Any

from treeprop_ray import cli, config
from treeprop_ray.config import opt
from treeprop_ray.errors import UserError


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
    storage: str = opt("", "where the checkpoints lie, if config.yaml of the run names a URL")


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
    from treeprop_ray import methods
    from treeprop_ray.core.rule import LossRule
    from treeprop_ray.inference import adaptive, paths
    from treeprop_ray.reporting.adaptive import show
    from treeprop_ray.run.reading import open_run

    s = settings
    of_run, samples, point, network = open_run(s.run, s.checkpoint, s.data_root, s.storage)
    batches = samples.batches(s.split)
    if s.mode == "adaptive":
        outcomes, fixed = adaptive.outcomes(network, of_run, batches, s.threshold)
        figure = show(s.run, s.out, s.split, outcomes, fixed)
        table = f"{adaptive.table_of(outcomes, list(fixed))}\nfigure: {figure}"
    else:
        method, text = methods.of(of_run), paths.as_path_text(s.path)
        outline = method.outline(of_run, network.tree)
        wanted = outline.paths
        if text != "all":
            name = text if text in wanted else "path"
            wanted = {name: paths.parse_path(text, outline, method)}
        scores = paths.score_network(network, wanted, batches, LossRule.of(of_run))
        table = outline.table(wanted, {s.split: scores})
    print(f"{point.path}\n{table}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.evaluate`."""
    return cli.main(__doc__ or "", EvaluateSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
