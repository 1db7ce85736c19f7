"""Examine this machine and its Ray cluster, and say what to mend.

    python -m treeprop_ray.doctor                                # this machine, a local Ray
    python -m treeprop_ray.doctor ray.address=auto               # on a node of a cluster
    python -m treeprop_ray.doctor experiment=cifar10_vit --json  # another experiment, for programs
    python -m treeprop_ray.doctor simulate nodes=4 gpus=1        # plan: four made-up machines

Every line is ok, warn or fail, and a remedy follows. Exit code 0: nothing failed; 1: something did.
`simulate` starts made-up machines here and shows which actor of the experiment lands on which.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from treeprop_ray import cli, config
from treeprop_ray.config import Settings, opt


@dataclass
class DoctorSettings(Settings):
    """The settings of train (of the experiment to place), and these."""

    task: str = opt("check", "the first word of the command", choices=["check", "simulate"])
    engine: str = opt("ray", "doctor looks at Ray", choices=["ray"])
    nodes: int = opt(2, "simulate: how many machines", low=1, high=64)
    cpus: int = opt(8, "simulate: CPUs of each", low=1, high=1024)
    gpus: int = opt(0, "simulate: GPUs of each", low=0, high=64)
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
    return simulated(settings) if settings.task == "simulate" else checked(settings)


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
    placed = simulate.simulate(s, s.nodes, s.cpus, s.gpus)
    where = f"{s.nodes} made-up machines with {s.cpus} CPU + {s.gpus} GPU each"
    text = f"experiment={s.experiment} on {where}\n{simulate.table(placed, s.nodes)}"
    print(json.dumps([asdict(p) for p in placed], indent=2) if s.json else text)
    return cli.DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.doctor`."""
    words = sys.argv[1:] if argv is None else argv
    words = ["json=true" if w == "--json" else w for w in words]
    return cli.main(__doc__ or "", DoctorSettings, load, run, argv=words)


if __name__ == "__main__":
    sys.exit(main())
