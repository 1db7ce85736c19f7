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

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from treeprop_ray import config
from treeprop_ray.config import Settings, cli, opt


@dataclass
class DoctorSettings(Settings):
    """The settings of train (of the experiment to place), and these."""

    task: str = opt("check", "the first word of the command", choices=["check", "simulate", "gpu"])
    engine: str = opt("ray", "doctor looks at Ray", choices=["ray"])
    nodes: int = opt(2, "simulate: how many machines", low=1, high=64)
    cpus: int = opt(8, "simulate: CPUs of each", low=1, high=1024)
    gpus: int = opt(0, "simulate: GPUs of each", low=0, high=64)
    to: str = opt(config.LOCAL, f"gpu: folder for its pages; --record: {config.PUBLISHED}")
    speeds: list[float] = opt(
        [], "simulate: speed of a device of each machine, e.g. [1,1,0.4]; empty: all alike"
    )
    json: bool = opt(False, "print JSON instead of lines; also --json")


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
    from treeprop_ray.checkup import FAIL, cluster, machine, report, summary, worst

    findings = []
    for finding in chain(machine.examine(settings), cluster.examine(settings)):
        findings.append(finding)
        if not settings.json:
            print(finding, flush=True)
    print(json.dumps(report(findings), indent=2) if settings.json else summary(findings))
    return cli.FAILED if worst(findings) == FAIL else cli.DONE


def simulated(settings: DoctorSettings) -> int:
    """Place the experiment on made-up machines."""
    from treeprop_ray.checkup import simulate

    s = settings
    placed, why = simulate.simulate(s, s.nodes, s.cpus, s.gpus, s.speeds)
    where = f"{s.nodes} made-up machines with {s.cpus} CPU + {s.gpus} GPU each"
    lines = [f"experiment={s.experiment} on {where}", *why, simulate.table(placed, s.nodes)]
    print(json.dumps([asdict(p) for p in placed], indent=2) if s.json else "\n".join(lines))
    return cli.DONE


def first_gpu(settings: DoctorSettings) -> int:
    """Everything that a machine without a GPU cannot show."""
    from treeprop_ray.benchmarks import gpu as bench
    from treeprop_ray.checkup import FAIL, gpu, report, summary, worst
    from treeprop_ray.engine import runtime

    findings = []
    owns = runtime.start(settings.ray)
    try:
        for finding in gpu.examine():
            findings.append(finding)
            if not settings.json:
                print(finding, flush=True)
        if findings[0].status != FAIL:
            for text in (gpu.write(findings, settings.to), bench.write_all(settings.to)):
                print(text, file=sys.stderr if settings.json else sys.stdout)
    finally:
        if owns:
            runtime.stop()
    print(json.dumps(report(findings), indent=2) if settings.json else summary(findings))
    return cli.FAILED if worst(findings) == FAIL else cli.DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.doctor`."""
    words = sys.argv[1:] if argv is None else argv
    words = ["json=true" if w == "--json" else w for w in words]
    word = f"to={config.PUBLISHED}"
    return cli.main(__doc__ or "", DoctorSettings, load, run, argv=words, record=word)


if __name__ == "__main__":
    sys.exit(main())
