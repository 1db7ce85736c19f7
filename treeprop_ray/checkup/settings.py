"""Settings of the commands doctor and plan. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray import config
from treeprop_ray.config import Settings, opt


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
