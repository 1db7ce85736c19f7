"""Examine this machine and its Ray cluster, and say what to mend.

    python -m treeprop_ray.doctor                                # this machine, a local Ray
    python -m treeprop_ray.doctor ray.address=auto               # on a node of a cluster
    python -m treeprop_ray.doctor experiment=cifar10_vit --json  # another experiment, for programs
    python -m treeprop_ray.doctor simulate nodes=4 gpus=1        # plan: four made-up machines
    python -m treeprop_ray.doctor gpu                            # the first GPU: checks and pages

Every line is ok, warn or fail, and a remedy follows. Exit code 0: nothing failed; 1: something did.
`simulate` starts made-up machines here and shows which actor of the experiment lands on which.
`gpu` takes about ten minutes: it trains on the GPU against the CPU (float32 and bf16, an actor per
node, packed, GPUs shared), sends tensors from GPU to GPU, measures steps and memory, and writes the
pages gpu_check, gpu_hop and gpu_step of results/local, with --record of results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain

from treeprop_ray import config
from treeprop_ray.checkup.settings import DoctorSettings
from treeprop_ray.config import cli


def load(words: Sequence[str]) -> DoctorSettings:
    """`doctor [TASK] key=value …`: the task may stand without its key."""
    from treeprop_ray import methods

    words = [f"task={w}" if i == 0 and "=" not in w else w for i, w in enumerate(words)]
    settings = config.load(words, DoctorSettings)
    assert isinstance(settings, DoctorSettings)
    methods.checked(settings)
    return settings


def run(settings: DoctorSettings) -> int:
    """The doctor command."""
    tasks = {"check": checked, "simulate": simulated, "gpu": first_gpu}
    return tasks[settings.task](settings)


def checked(settings: DoctorSettings) -> int:
    """Look at everything, print as it is found, and sum up."""
    from treeprop_ray.checkup import cluster, machine, shown, summed_up

    every = chain(machine.examine(settings), cluster.examine(settings))
    return cli.FAILED if summed_up(list(shown(every, settings.json)), settings.json) else cli.DONE


def simulated(settings: DoctorSettings) -> int:
    """Place the experiment on made-up machines."""
    from treeprop_ray.checkup import simulate

    print(simulate.report(settings))
    return cli.DONE


def first_gpu(settings: DoctorSettings) -> int:
    """Everything that a machine without a GPU cannot show."""
    from treeprop_ray.benchmarks import gpu as bench
    from treeprop_ray.checkup import FAIL, gpu, shown, summed_up
    from treeprop_ray.engine import runtime

    owns = runtime.start(settings.ray)
    try:
        findings = list(shown(gpu.examine(), settings.json))
        if findings[0].status != FAIL:
            for text in (gpu.write(findings, settings.to), bench.write_all(settings.to)):
                print(text, file=sys.stderr if settings.json else sys.stdout)
    finally:
        if owns:
            runtime.stop()
    return cli.FAILED if summed_up(findings, settings.json) else cli.DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.doctor`."""
    words = sys.argv[1:] if argv is None else argv
    words = ["json=true" if w == "--json" else w for w in words]
    word = f"to={config.PUBLISHED}"
    return cli.main(__doc__ or "", DoctorSettings, load, run, argv=words, record=word)


if __name__ == "__main__":
    sys.exit(main())
