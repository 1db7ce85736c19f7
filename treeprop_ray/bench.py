"""Measure: every benchmark compares things in one run and prints the ratio.

    python -m treeprop_ray.bench step                   # local TreeProp step over a BP step
    python -m treeprop_ray.bench step engine=ray        # two actors against one process
    python -m treeprop_ray.bench hop                    # one hop: object store, stream, bare wire
    python -m treeprop_ray.bench span                   # level waves against a chain of actors
    python -m treeprop_ray.bench span transport=both    # short blocks, object store and stream
    python -m treeprop_ray.bench span transport=both hosts=16 t=[2,5]   # many actors: its own page
    python -m treeprop_ray.bench tt                     # recurrent: TreeProp-TT over BPTT
    python -m treeprop_ray.bench tt_span                # the same on emulated devices
    python -m treeprop_ray.bench faults                 # twenty killed actors
    python -m treeprop_ray.bench losses                 # actors and machines lost, with copies
    python -m treeprop_ray.bench snapshots              # step time with and without recovery points
    python -m treeprop_ray.bench pipeline               # beside torch.distributed.pipelining
    python -m treeprop_ray.bench pipeline_span          # the same with more stages, emulated
    python -m treeprop_ray.bench baselines              # table of finished MNIST runs
    python -m treeprop_ray.bench accounting             # work, memory and bytes of every method
    python -m treeprop_ray.bench vit                    # full-size cifar10_vit, time per step
    python -m treeprop_ray.bench vit engine=ray         # the same in two actors
    python -m treeprop_ray.bench gpt steps=3            # GPT-2 small: peak memory, bytes per step
    python -m treeprop_ray.bench generate run=results/runs/<name>   # drafts against plain decoding
    python -m treeprop_ray.bench gpu                    # steps and memory on GPUs; doctor gpu
    python -m treeprop_ray.bench plan                   # a cost model of clusters, and its check
    python -m treeprop_ray.bench finetune               # a Hugging Face model: TreeProp and BP
    python -m treeprop_ray.bench replicas               # trees times replicas, 1F1B, DP
    python -m treeprop_ray.bench replicas_real          # two actors beside DDP and 1F1B
    python -m treeprop_ray.bench checkpoint             # what actors write themselves

Results go to results/local/bench_<name>.csv and .md with the command that made them; with --record
to results/, where the project keeps its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from treeprop_ray import config
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.config import cli


def load(words: Sequence[str]) -> BenchSettings:
    """`bench NAME key=value …`: the name may stand without its key."""
    words = [f"bench={w}" if i == 0 and "=" not in w else w for i, w in enumerate(words)]
    settings: BenchSettings = config.merge(BenchSettings, ("", config.parse_overrides(words)))
    return settings


def run(settings: BenchSettings) -> None:
    """The bench command."""
    module, _, function = settings.function.partition(".")
    getattr(import_module(f"treeprop_ray.benchmarks.{module}"), function)(settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.bench`."""
    word = f"out={config.PUBLISHED}"
    return cli.main(__doc__ or "", BenchSettings, load, run, argv=argv, record=word)


if __name__ == "__main__":
    sys.exit(main())
