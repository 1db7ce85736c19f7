"""Accuracy (text: perplexity) of the full chain, the spine paths, or any path of a trained tree.

    python -m treeprop_ray.evaluate run=results/runs/<name>
    python -m treeprop_ray.evaluate run=results/runs/<name> path=[0,4,6,8] split=validation
    python -m treeprop_ray.evaluate run=results/runs/<name> mode=adaptive blocks=[1,2,3]

mode=adaptive asks short paths first and lets a sample stop where it is sure; the answers of all
paths that it has run are joined. Their logits are read by affine maps, fitted to training samples;
which paths, how they are joined and the thresholds are chosen by the validation split. All that is
kept in the run folder as adaptive.json (for export path=adaptive and for servers); printed are
accuracy and blocks on `split` for each budget of `blocks=`, beside the best single path of as many
blocks. threshold= asks for one threshold at all exits instead. Draws figures/adaptive.png in the
run folder; with out=results/local the table and the figure are written there too, as adaptive.*,
and with --record to results/, where the project keeps its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from treeprop_ray import config
from treeprop_ray.config import cli
from treeprop_ray.errors import UserError
from treeprop_ray.inference.settings import EvaluateSettings


def load(words: Sequence[str]) -> EvaluateSettings:
    """Settings from command-line words."""
    settings: EvaluateSettings = config.merge(EvaluateSettings, ("", config.parse_overrides(words)))
    adaptive = {"blocks": settings.blocks, "threshold": settings.threshold, "out": settings.out}
    if settings.mode != "adaptive":
        for key, value in adaptive.items():
            if value not in (None, ""):
                raise UserError(f"{key}={value}: belongs to mode=adaptive")
        return settings
    if settings.path != "all":
        raise UserError(f"path={settings.path}: mode=adaptive chooses its paths; leave path=all")
    from treeprop_ray.inference.adaptive import budgets_of, thresholds_of

    if settings.blocks is not None and settings.threshold is not None:
        raise UserError(f"threshold={settings.threshold}: either this or blocks={settings.blocks}")
    if settings.blocks is not None:
        budgets_of(settings.blocks)
    if settings.threshold is not None:
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
    if s.mode == "adaptive":
        step = point.meta["step"]
        found = adaptive.evaluate(network, of_run, samples, s.split, step, s.blocks, s.threshold)
        found.calibration.write(s.run)
        figure = show(s.run, s.out, s.split, found)
        table = f"{adaptive.table_of(found)}\nfigure: {figure}"
    else:
        method, text = methods.of(of_run), paths.as_path_text(s.path)
        outline = method.outline(of_run, network.tree)
        wanted = outline.paths
        if text != "all":
            name = text if text in wanted else "path"
            wanted = {name: paths.parse_path(text, outline, method)}
        scores = paths.score_network(network, wanted, samples.batches(s.split), LossRule.of(of_run))
        table = outline.table(wanted, {s.split: scores})
    print(f"{point.path}\n{table}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.evaluate`."""
    word = f"out={config.PUBLISHED}"
    return cli.main(__doc__ or "", EvaluateSettings, load, run, argv=argv, record=word)


if __name__ == "__main__":
    sys.exit(main())
