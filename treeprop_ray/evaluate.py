"""Accuracy of the full chain, the spine paths, or any path of a trained tree.

python -m treeprop_ray.evaluate run=results/runs/<name>
python -m treeprop_ray.evaluate run=results/runs/<name> path=[0,4,6,8] split=validation
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeprop_ray import cli, config
from treeprop_ray.config import opt


@dataclass
class EvaluateSettings:
    """Settings of the evaluate command."""

    run: str = opt("", "run folder, e.g. results/runs/<name>")
    checkpoint: str = opt("last", "last, best or a step number")
    path: Any = opt("all", "all, full, spine-k, or indices such as [0,4,6,7,8]")
    split: str = opt("test", "which split", choices=["train", "validation", "test"])
    data_root: str | None = opt(None, "hub folder, if it has moved since the run")


def load(words: Sequence[str]) -> EvaluateSettings:
    """Settings from command-line words."""
    settings: EvaluateSettings = config.merge(EvaluateSettings, ("", config.parse_overrides(words)))
    return settings


def run(settings: EvaluateSettings) -> None:
    """The evaluate command."""
    from treeprop_ray import data
    from treeprop_ray.engine.base import score_network
    from treeprop_ray.runfiles import (
        as_path_text,
        check_permutation,
        load_network,
        parse_path,
        pick_checkpoint,
        run_settings,
    )
    from treeprop_ray.train import outline_of, table_of

    of_run = run_settings(settings.run)
    of_run.data.root = settings.data_root or of_run.data.root
    found = pick_checkpoint(settings.run, settings.checkpoint)
    samples = data.load(of_run)
    check_permutation(settings.run, samples.permutation)
    network = load_network(of_run, samples, found)
    text = as_path_text(settings.path)
    outline = outline_of(of_run, network.tree)
    paths = outline.paths
    if text != "all":
        paths = {text if text in paths else "path": parse_path(text, outline, of_run.method)}
    scores = score_network(network, paths, samples.batches(settings.split))
    print(f"{found.path}\n{table_of(outline, paths, {settings.split: scores})}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.evaluate`."""
    return cli.main(__doc__ or "", EvaluateSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
