"""Train a network by TreeProp, or the same chain by a baseline.

    python -m treeprop_ray.train                                        # digits, a minute
    python -m treeprop_ray.train experiment=mnist_d3 model.hidden=100 epochs=15
    python -m treeprop_ray.train experiment=mnist_d3 method=bp          # backpropagation
    python -m treeprop_ray.train experiment=mnist_d3 method=cff         # forward-forward

The same command again continues an interrupted run. Flags: --help (with words: the values that
apply then), --cfg (print the resolved settings, what a step costs, with engine=ray the placement of
every node too, and stop), --debug (what went wrong with its traceback, not only in one line).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from treeprop_ray import config
from treeprop_ray.config import Settings, cli


def load(words: Sequence[str]) -> Settings:
    """Settings from command-line words, checked by their method."""
    from treeprop_ray import methods

    return methods.checked(config.load(words))


def run(settings: Settings) -> int:
    """The train command."""
    from treeprop_ray.reporting.callbacks import standard
    from treeprop_ray.run.ending import told
    from treeprop_ray.run.ray_train import train_in_workers
    from treeprop_ray.run.trainer import Trainer

    callbacks = standard(settings)
    trainer = Trainer.of(settings, callbacks=callbacks)
    assert trainer.folder is not None
    if (done := trainer.finished()) is not None:
        print(f"this run is finished; fresh=true starts it anew\n{told(trainer.folder.path, done)}")
        return cli.DONE
    workers = settings.engine == "train"
    summary = train_in_workers(trainer, callbacks) if workers else trainer.train()
    print(told(trainer.folder.path, summary))
    return cli.DONE


def show(settings: Settings) -> str:
    """What --cfg adds: what a step costs, and for the Ray engine where every node would live."""
    from treeprop_ray.reporting.preview import cost_of

    lines = [cost_of(settings)]
    if settings.engine == "ray":
        from treeprop_ray.reporting.placing import placement_of

        lines.append(placement_of(settings))
    return "\n".join(filter(None, lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.train`."""
    return cli.main(__doc__ or "", Settings, load, run, show, argv)


if __name__ == "__main__":
    sys.exit(main())
