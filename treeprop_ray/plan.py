"""Plan before you pay: what a step would take on machines that need not be here.

    python -m treeprop_ray.plan experiment=wikitext103_d6 nodes=8 gpus=8      # 64 GPUs
    python -m treeprop_ray.plan experiment=cifar10_vit_small cpus=4 measure=true   # timed here
    python -m treeprop_ray.plan model=own.module:factory data.name=own.module:samples gpus=8
    python -m treeprop_ray.plan model=openai-community/gpt2-large data.length=1024 batch=64 gpus=8
    python -m treeprop_ray.plan experiment=wikitext103_d6 gpus=8 --html       # a page

For trees x replicas, pipelines (one forward one backward, zero bubble) and data parallelism:
predicted step, memory of a device and bytes, and which is fastest from where on. `model=` takes a
network of this package, one's own, or a Hugging Face name or folder (its config alone is read).
`--html` writes a page with the tree, the waves of a step, and sliders. docs/scaling.md says how far
to trust it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from treeprop_ray import config
from treeprop_ray.config import Settings, cli, opt


@dataclass
class PlanSettings(Settings):
    """The settings of train (of the network to plan for), and these."""

    nodes: int = opt(1, "machines", low=1, high=4096)
    cpus: int = opt(8, "CPUs of each, the devices where there are no GPUs", low=1, high=1024)
    gpus: int = opt(0, "GPUs of each", low=0, high=64)
    speeds: list[float] = opt(
        [], "speed of a device of each machine beside the others, e.g. [1,1,0.4]; empty: all alike"
    )
    tflops: float = opt(
        0.0,
        "what blocks reach on a device, 10^12 FLOP/s; 0: 125 of a GPU (40 % of an A100), 0.05 of a "
        "core",
        low=0,
    )
    memory: float = opt(0.0, "GB of a device; 0: 80 of a GPU, no limit for CPUs", low=0)
    link: str = opt(
        "auto",
        "what joins the devices; auto: nvlink in one machine with GPUs, ethernet (100 Gbit/s) "
        "between machines, shared memory in one machine of CPUs; or GB/s",
    )
    measure: bool = opt(False, "time a block in this process instead of counting FLOP")
    speedup: float = opt(
        1.0, "measure: how many times as fast a device is as this process", above=0
    )
    hf: str = opt("", "a Hugging Face name or folder in place of model.name; also model=")
    to: str = opt(f"{config.LOCAL}/plan.html", "--html: the page")


def load(words: Sequence[str]) -> PlanSettings:
    """`model=X` is a network of this package, one's own, or a Hugging Face model."""
    from treeprop_ray import methods
    from treeprop_ray.checkup.planning import spelled

    settings = config.load(spelled(words), PlanSettings)
    assert isinstance(settings, PlanSettings)
    methods.checked(settings)
    return settings


def run(settings: PlanSettings) -> None:
    """Print the plan."""
    from treeprop_ray.checkup import planning

    print(planning.report(*planning.prepared(settings))[0])


def page(settings: PlanSettings) -> None:
    """Print the plan and write its page."""
    from treeprop_ray.checkup import planning
    from treeprop_ray.reporting.plan_page import write_plan

    work, fleet = planning.prepared(settings)
    text, verdict = planning.report(work, fleet)
    print(f"{text}\nwrote {write_plan(work, fleet, verdict, settings.to)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.plan`."""
    return cli.main(__doc__ or "", PlanSettings, load, run, argv=argv, flags={"--html": page})


if __name__ == "__main__":
    sys.exit(main())
