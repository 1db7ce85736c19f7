"""Train a network by TreeProp, or the same chain by a baseline.

    python -m treeprop_ray.train                                        # digits, a minute
    python -m treeprop_ray.train experiment=mnist_d3 model.hidden=100 epochs=15
    python -m treeprop_ray.train experiment=mnist_d3 method=bp          # backpropagation
    python -m treeprop_ray.train experiment=mnist_d3 method=cff         # forward-forward

The same command again continues an interrupted run. Flags: --help (with words: the values that
apply then), --cfg (print the resolved settings, with engine=ray the placement of every node too,
and stop), --debug (what went wrong with its traceback, not only in one line).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from treeprop_ray import cli, config
from treeprop_ray.config import Settings


def load(words: Sequence[str]) -> Settings:
    """Settings from command-line words, checked by their method."""
    from treeprop_ray import methods

    return methods.checked(config.load(words))


def run(settings: Settings) -> int:
    """The train command."""
    from treeprop_ray.reporting.callbacks import standard
    from treeprop_ray.run.ray_train import train_in_workers
    from treeprop_ray.run.trainer import Trainer

    callbacks = standard(settings)
    trainer = Trainer.of(settings, callbacks=callbacks)
    assert trainer.folder is not None
    if (done := trainer.finished()) is not None:
        print(f"this run is finished; fresh=true starts it anew\n{done['table']}")
        print(f"files: {trainer.folder.path}")
        return cli.DONE
    workers = settings.engine == "train"
    summary = train_in_workers(trainer, callbacks) if workers else trainer.train()
    print(f"{summary['table']}\nfiles: {trainer.folder.path}")
    return cli.DONE


def show_plan(settings: Settings) -> str:
    """What --cfg adds for the Ray engine: where every node would live on this machine."""
    if settings.engine != "ray":
        return ""
    from treeprop_ray import data, methods
    from treeprop_ray.engine import runtime
    from treeprop_ray.reporting.tables import columns

    method, cluster = methods.of(settings), runtime.cluster_of(settings.ray)
    recipe = method.network(settings, data.load(settings).shape)
    tree = method.tree(settings)
    plan = method.plan(settings, tree, cluster)
    device = f"{plan.gpus:g} GPU" if plan.gpus else f"{plan.cpus:g} CPU"
    rows = [["node", "level", "actor", "device", "parameters"]]
    for resident in method.residents(settings, plan, tree):
        count = sum(map(recipe.count_parameters, resident.parts))
        actor = plan.names[resident.host]
        rows.append([resident.node, resident.level, actor, device, f"{count:,}"])
    lines = [f"placement on {cluster}:", *columns(rows, str.rjust).splitlines()]
    return "\n".join(f"# {line}" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.train`."""
    return cli.main(__doc__ or "", Settings, load, run, show_plan, argv)


if __name__ == "__main__":
    sys.exit(main())
