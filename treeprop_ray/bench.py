"""Measure: every benchmark compares things in one run and prints the ratio.

    python -m treeprop_ray.bench step                   # local TreeProp step over a BP step
    python -m treeprop_ray.bench step engine=ray        # two actors against one process
    python -m treeprop_ray.bench span                   # level waves against a chain of actors
    python -m treeprop_ray.bench tt                     # recurrent: TreeProp-TT over BPTT
    python -m treeprop_ray.bench faults                 # twenty killed actors
    python -m treeprop_ray.bench snapshots              # step time with and without recovery points
    python -m treeprop_ray.bench pipeline               # beside torch.distributed.pipelining
    python -m treeprop_ray.bench baselines              # table of finished MNIST runs
    python -m treeprop_ray.bench accounting             # work, memory and bytes of every method

Results go to results/bench_<name>.csv and .md with the command that made them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from treeprop_ray import cli, config
from treeprop_ray.config import opt


@dataclass
class BenchSettings:
    """Settings of the bench command."""

    bench: str = opt(
        "step",
        "which benchmark (the first word of the command)",
        choices=[
            "step",
            "span",
            "tt",
            "faults",
            "snapshots",
            "accounting",
            "pipeline",
            "baselines",
        ],
    )
    engine: str = opt("local", "step: one process or Ray actors", choices=["local", "ray"])
    rounds: int = opt(9, "how often all candidates are timed in turn", low=1)
    steps: int = opt(20, "steps per timing", low=1)
    depth: int = opt(10, "tt: largest depth of the time tree", low=1, high=14)
    runs: str = opt("results/runs", "baselines: folder that holds the runs to read")
    out: str = opt("results", "folder for the table")


def load(words: Sequence[str]) -> BenchSettings:
    """`bench NAME key=value …`: the name may stand without its key."""
    words = [f"bench={w}" if i == 0 and "=" not in w else w for i, w in enumerate(words)]
    settings: BenchSettings = config.merge(BenchSettings, ("", config.parse_overrides(words)))
    return settings


def run(settings: BenchSettings) -> None:
    """The bench command."""
    if settings.bench == "span":
        from treeprop_ray.benchmarks import span

        span.run(settings)
    elif settings.bench == "tt":
        from treeprop_ray.benchmarks import tt

        tt.run(settings)
    elif settings.bench == "faults":
        from treeprop_ray.benchmarks import faults

        faults.run(settings)
    elif settings.bench == "snapshots":
        from treeprop_ray.benchmarks import faults

        faults.run_snapshots(settings)
    elif settings.bench == "baselines":
        from treeprop_ray.benchmarks import baselines_mnist

        baselines_mnist.run(settings)
    elif settings.bench == "pipeline":
        from treeprop_ray.benchmarks import pipeline

        pipeline.run(settings)
    elif settings.bench == "accounting":
        from treeprop_ray.benchmarks import accounting

        accounting.run(settings)
    elif settings.engine == "ray":
        from treeprop_ray.benchmarks import step_ray

        step_ray.run(settings)
    else:
        from treeprop_ray.benchmarks import step_local

        step_local.run(settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.bench`."""
    return cli.main(__doc__ or "", BenchSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
