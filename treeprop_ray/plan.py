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

from treeprop_ray import config
from treeprop_ray.checkup.settings import PlanSettings
from treeprop_ray.config import cli


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
