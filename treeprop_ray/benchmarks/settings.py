"""The settings of the bench command, and which benchmarks there are. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treeprop_ray.config import LOCAL, PUBLISHED, RUNS, opt

BENCHMARKS = {  # benchmark -> its function in treeprop_ray/benchmarks
    "step": "step_local.run",
    "hop": "hop.run",
    "span": "span.run",
    "tt": "tt.run",
    "tt_span": "tt_span.run",
    "faults": "faults.run",
    "snapshots": "faults.run_snapshots",
    "losses": "losses.run",
    "pipeline": "pipeline.run",
    "pipeline_span": "pipeline_span.run",
    "baselines": "baselines_mnist.run",
    "accounting": "accounting.run",
    "vit": "vit.run",
    "gpt": "gpt.run",
    "generate": "generate.run",
    "gpu": "gpu.run",
    "plan": "plan.run",
    "finetune": "finetune.run",
    "replicas": "replicas.run",
    "replicas_real": "replicas_real.run",
    "checkpoint": "checkpoints.run",
}


@dataclass
class BenchSettings:
    """Settings of the bench command."""

    bench: str = opt(
        "step",
        "which benchmark (the first word of the command)",
        choices=list(BENCHMARKS),
    )
    engine: str = opt("local", "step, vit: one process or Ray actors", choices=["local", "ray"])
    transport: str = opt(
        "store",
        "span, step engine=ray, faults, losses: by the object store, by stream, or both in one "
        "run (losses: not both)",
        choices=["store", "stream", "both"],
    )
    hosts: int = opt(4, "span transport=stream|both: actors of each transport", low=2, high=128)
    t: list[float] = opt(
        [], "span: ms of a block, e.g. [1,2,5,20]; empty: 5, 20, 50, by stream 1, 2, 5, 20"
    )
    rounds: int = opt(9, "how often all candidates are timed in turn", low=1)
    steps: int = opt(20, "steps per timing", low=1)
    losses: int = opt(50, "losses: how many, of all kinds together", low=15)
    depth: int = opt(10, "tt: largest depth of the time tree", low=1, high=14)
    runs: str = opt(RUNS, "baselines: folder that holds the runs to read")
    batch: int = opt(2, "gpt: windows in a batch", low=1)
    length: int = opt(256, "gpt: tokens of a window", low=2, high=1024)
    run: Any = opt("", "generate: run folder of a language model, or a list of them")
    out: str = opt(LOCAL, f"folder for the table; --record: {PUBLISHED}")

    @property
    def function(self) -> str:
        """The benchmark's function, as module.function."""
        if self.bench == "step" and self.engine == "ray":
            return "step_ray.run"
        if self.bench == "span" and self.transport != "store":
            return "span_wire.run"
        return BENCHMARKS[self.bench]
