"""bench gpu: steps on one GPU and on all, and memory beside what was counted; about five minutes.

`doctor gpu` runs this after its checks; results/gpu_step.md has the same form on every machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from treeprop_ray import config
from treeprop_ray.benchmarks.memory import Meter, resident
from treeprop_ray.benchmarks.random_data import random_images, random_job, random_text
from treeprop_ray.benchmarks.settings import BenchSettings
from treeprop_ray.config import RaySettings, Settings
from treeprop_ray.core import devices
from treeprop_ray.data import DataSet
from treeprop_ray.engine import Engine, LocalEngine, build, runtime
from treeprop_ray.errors import UserError, first_line
from treeprop_ray.hosts.base import Host
from treeprop_ray.reporting.tables import markdown, write_table

NETWORKS: dict[str, tuple[list[str], Callable[[Settings], DataSet]]] = {
    "cifar10_vit": (
        ["experiment=cifar10_vit", "data.augment=none"],
        lambda settings: random_images(2 * settings.batch),
    ),
    "GPT-2 small": (
        ["experiment=wikitext103_d4", "batch=8", "data.length=512"],
        random_text,
    ),
}
CANDIDATES = {  # name -> words; those with engine=ray need two GPUs
    "BP, float32": ["method=bp", "precision=float32"],
    "TreeProp, float32": ["precision=float32"],
    "BP, bf16": ["method=bp", "precision=bf16"],
    "TreeProp, bf16": ["precision=bf16"],
    "TreeProp, bf16, all GPUs, store": ["precision=bf16", "engine=ray", "placement=packed"],
    "TreeProp, bf16, all GPUs, stream": [
        "precision=bf16", "engine=ray", "placement=packed", "transport=stream",
    ],
    "BP, bf16, pipeline over all GPUs": [
        "method=bp", "precision=bf16", "engine=ray", "placement=packed", "microbatches=4",
    ],
}  # fmt: skip
SECONDS = 12.0  # of a candidate, once it is warm
MOST = 200  # steps
COLUMNS = (
    "network", "candidate", "ms per step", "samples/s", "peak (GB)", "counted (GB)", "why not",
)  # fmt: skip
NOTES = [
    "Random data of the right shapes. ms per step: median after two steps of warm-up. peak: most "
    "bytes that torch's allocator held for tensors, on the fullest device. counted: weights, "
    "optimizer state and the tensors that live at the same time in one process, by the counting "
    "that [docs/scaling.md](../docs/scaling.md) plans with (one GPU only). A row with `-` did not "
    "run, and says why.",
]


def run(bench: BenchSettings) -> None:
    """All networks and candidates that fit this machine, or the cluster of RAY_ADDRESS."""
    owns = runtime.start(RaySettings())
    try:
        if not devices.gpus.available() and runtime.cluster().gpus < 1:
            raise UserError("bench gpu: neither this machine nor its Ray has a usable GPU")
        print(write_all(bench.out))
    finally:
        if owns:
            runtime.stop()


def write_all(out: str) -> str:
    """Measure on the running Ray and write results/gpu_step.*; returns the table."""
    rows: list[dict[str, Any]] = []
    gpus = int(runtime.cluster().gpus)
    for network, (words, samples) in NETWORKS.items():
        for candidate, more in CANDIDATES.items():
            task = (network, candidate, [*words, *more], samples, SECONDS, gpus)
            spread = "engine=ray" in more
            rows.append(row_of(*task) if spread else runtime.on_gpu(row_of, *task))
            print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    names = ", ".join(dict.fromkeys(runtime.on_gpu(names_here)))
    return write_table(out, "gpu_step", f"Steps on GPUs ({gpus} x {names})", rows, NOTES)


def names_here() -> list[str]:
    """The GPUs that this process sees."""
    return devices.gpus.names()


def row_of(
    network: str,
    candidate: str,
    words: list[str],
    samples: Callable[[Settings], DataSet],
    seconds: float,
    gpus: int,
) -> dict[str, Any]:
    """One line of the table."""
    row: dict[str, Any] = dict.fromkeys(
        (
            "network",
            "candidate",
            "ms per step",
            "samples/s",
            "peak (GB)",
            "counted (GB)",
            "why not",
        ),
        "-",
    )
    row |= {"network": network, "candidate": candidate}
    if "engine=ray" in words and gpus < 2:
        return row | {"why not": "needs two GPUs"}
    settings = config.load([*words, f"device={devices.NAME}", "timeline_steps=0", "name=gpu"])
    try:
        engine = build(random_job(settings, samples(settings)))
    except Exception as e:  # out of memory, no such kernel: the rest goes on
        return row | {"why not": first_line(e)}
    try:
        times = timed(engine, seconds)
        peaks = engine.get([engine.ask(k, peak_of) for k in range(len(engine.plan.names))])
        row |= {
            "ms per step": 1000 * statistics.median(times),
            "samples/s": settings.batch / statistics.median(times),
            "peak (GB)": max(peaks) / 1e9,
        }
        if isinstance(engine, LocalEngine):
            row["counted (GB)"] = counted(engine) / 1e9
    except Exception as e:
        row["why not"] = first_line(e)
    finally:
        engine.close()
    return row


def timed(engine: Engine, seconds: float) -> list[float]:
    """Seconds of steps, two of warm-up left out."""
    times: list[float] = []
    for step in range(MOST):
        began = time.perf_counter()
        engine.step(step, report=False)
        engine.reports()
        if isinstance(engine, LocalEngine):
            devices.gpus.wait()
        times.append(time.perf_counter() - began)
        if step == 1:
            for k in range(len(engine.plan.names)):
                engine.get([engine.ask(k, forget_peak)])
        if step >= 3 and sum(times[2:]) > seconds:
            break
    return times[2:]


def forget_peak(host: Host) -> int:
    """Begin a new measurement of memory in a host's process."""
    devices.gpus.forget_peak()
    return 0


def peak_of(host: Host) -> int:
    """The most bytes of a host's process on its device."""
    return devices.gpus.peak()


def counted(engine: LocalEngine) -> int:
    """Bytes of weights, optimizer state, and the tensors that live at a time in one step."""
    with Meter() as meter:
        engine.step(MOST, report=False)
    return resident(engine.host.optimizer) + max(meter.peak.values(), default=0)
