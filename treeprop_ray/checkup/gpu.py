"""The first GPU: what `doctor gpu` looks at before it measures (benchmarks/gpu.py).

Everything here runs the package's own code on the device, against the same steps on the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch._C._distributed_c10d import TCPStore

from treeprop_ray import config, data, methods
from treeprop_ray.checkup import FAIL, OK, Finding, judge, size
from treeprop_ray.checkup.cluster import three_steps
from treeprop_ray.core import devices
from treeprop_ray.engine import build, runtime
from treeprop_ray.engine.direct import Direct, gpu_of
from treeprop_ray.errors import TrainingError, UserError, first_line
from treeprop_ray.reporting.tables import write_table

SMALL = [
    "experiment=digits", "model.name=vit", "model.hidden=48", "model.heads=3", "model.patch=2",
    "model.blocks=7", "batch=64", "name=doctor", "alpha=1", "beta=0.5", "objective=node_all_ce",
    "clip=1", "cpus_per_actor=0.1",
]  # fmt: skip
# what is compared with float32 on the CPU, and how far the losses of three steps may be from it
PRECISIONS = {"float32": 1e-3, "bf16": 3e-2}
PLACEMENTS = {
    "per_node, fractional GPUs": ["placement=per_node"],
    "packed, an actor per GPU": ["placement=packed"],
    "packed, two actors share a GPU": ["placement=packed", "hosts=2", "gpus_per_actor=0.5"],
    "packed, transport=stream": ["placement=packed", "transport=stream"],
}
SIZES = {"4 kB": 2**10, "1 MB": 2**18, "8 MB": 2**21, "64 MB": 2**24}  # floats
HOPS = 50
CHECK_NOTES = [
    "agreement: three steps of a small ViT on the embedded digits (eight blocks, beta 0.5, CE at "
    "every level) against the same steps in float32 in one process on the CPU: largest relative "
    "difference of the summed losses.",
]
HOP_NOTES = [
    f"Two actors with a GPU each send a tensor to and fro, {HOPS} times there and back, median of "
    "three; store: to the CPU, through Ray's object store, onto the other GPU, median of ten.",
]


def examine() -> Iterator[Finding]:
    """Devices, precision, placement, on the running Ray; the hop is measured apart (`hops`)."""
    if not devices.gpus.available() and runtime.cluster().gpus < 1:
        build = devices.gpus.build()
        seen = "nvidia-smi shows whether the driver sees one" if build else "torch is a CPU build"
        yield Finding("GPU", FAIL, f"neither torch nor {runtime.cluster()} has one", seen)
        return
    yield from runtime.on_gpu(cards)
    alone = losses([*SMALL, "device=cpu"])
    for precision, tolerance in PRECISIONS.items():
        words = [*SMALL, f"device={devices.NAME}", f"precision={precision}"]
        yield runtime.on_gpu(agreement, precision, alone, words, tolerance)
    for name, words in PLACEMENTS.items():
        there = [*SMALL, f"device={devices.NAME}", "engine=ray", *words]
        yield agreement(name, alone, there, PRECISIONS["float32"])


def cards() -> list[Finding]:
    """Every GPU that this process sees, and what torch can do with it."""
    gpus = devices.gpus
    found = [
        Finding("GPU", OK, f"{index}: {name}, {size(gpus.memory(index))}")
        for index, name in enumerate(gpus.names())
    ]
    bf16 = judge(
        "bf16",
        f"torch for CUDA {gpus.build()}, bfloat16 {'yes' if gpus.bf16() else 'no'}",
        fail=False,
        warn=not gpus.bf16(),
        remedy="older than Ampere: use precision=fp16 or float32",
    )
    return [*found, bf16]


def losses(words: Sequence[str]) -> list[float]:
    """The sum of all loss terms after each of three steps."""
    settings = config.load(words)
    engine = build(methods.job_of(settings, data.load(settings), 3))
    try:
        return three_steps(engine)
    finally:
        engine.close()


def agreement(what: str, alone: Sequence[float], words: list[str], tolerance: float) -> Finding:
    """Three steps there against three steps in float32 on the CPU."""
    began = time.perf_counter()
    try:
        there = losses(words)
    except (TrainingError, UserError, RuntimeError, RayError) as e:
        return Finding("agreement", FAIL, f"{what}: {first_line(e)}", f"train {' '.join(words)}")
    apart = max(abs(a - b) / abs(a) for a, b in zip(alone, there, strict=True))
    return judge(
        "agreement",
        f"{what}: losses {apart:.1e} from those of float32 on the CPU, at most {tolerance:g} "
        f"({time.perf_counter() - began:.1f} s)",
        fail=not apart <= tolerance,
        warn=False,
        remedy=f"compare train {' '.join(words)} with train device=cpu, step by step",
    )


# -- one hop ---------------------------------------------------------------------------------------


class Peer:
    """One of two actors that send a tensor to and fro."""

    def __init__(self, rank: int, meeting: tuple[str, int], session: str) -> None:
        self.device = devices.gpus.device(devices.NAME)
        self.rank, self.meeting, self.session = rank, meeting, session
        self.direct: Direct | None = None

    def where(self) -> str:
        """Which GPU this is."""
        return gpu_of(self.device)

    def join(self) -> None:
        """Meet the other one."""
        backend = devices.gpus.backend
        self.direct = Direct(backend, self.rank, 2, self.meeting, self.session, 60.0, self.device)
        self.direct.greet([1 - self.rank])

    def play(self, floats: int, hops: int) -> float:
        """Seconds of a hop: `hops` there and as many back."""
        assert self.direct is not None
        ball, other = torch.zeros(floats, device=self.device), 1 - self.rank
        devices.gpus.wait()
        began = time.perf_counter()
        for _ in range(hops):
            for sends in (self.rank == 0, self.rank == 1):
                if sends:
                    self.direct.send(other, ball)
                else:
                    self.direct.receive(other, ball)
        devices.gpus.wait()
        return (time.perf_counter() - began) / (2 * hops)

    def read(self, ball: Any) -> float:
        """A tensor that came through the object store, on the device."""
        return float(ball.to(self.device)[0])

    def call(self, other: Any, floats: int, hops: int) -> float:
        """Seconds of a hop through the object store: to the CPU, there, and onto the device."""
        ball = torch.zeros(floats, device=self.device)
        taken = []
        for _ in range(hops):
            began = time.perf_counter()
            ray.get(other.read.remote(ball.cpu()))
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)


def hops(rounds: int = 3) -> list[dict[str, Any]]:
    """Rows: a tensor between two GPUs, by nccl and by the object store; empty with one GPU."""
    if runtime.cluster().gpus < 2:
        return []
    store = TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
    make = ray.remote(num_cpus=0, num_gpus=1)(Peer)
    peers = [make.remote(rank, (store.host, store.port), "hop") for rank in range(2)]
    rows = []
    try:
        where = ray.get([peer.where.remote() for peer in peers], timeout=120)
        ray.get([peer.join.remote() for peer in peers], timeout=120)
        for name, floats in SIZES.items():
            times = [
                max(ray.get([peer.play.remote(floats, HOPS) for peer in peers], timeout=300))
                for _ in range(rounds)
            ]
            stored = ray.get(peers[0].call.remote(peers[1], floats, 10), timeout=300)
            direct = statistics.median(times)
            rows.append(
                {
                    "tensor": name,
                    f"{devices.gpus.backend} (ms)": 1000 * direct,
                    "GB/s": 4e-9 * floats / direct,
                    "store (ms)": 1000 * stored,
                    "GPUs": " and ".join(dict.fromkeys(where)),
                }
            )
    finally:
        for peer in peers:
            ray.kill(peer)
    return rows


def write(findings: Sequence[Finding], out: str) -> str:
    """results/gpu_check.* and gpu_hop.*; returns what they say about the hop."""
    rows = [{"check": f.what, "result": f.status, "found": f.found} for f in findings]
    write_table(out, "gpu_check", "The first GPU: checks", rows, CHECK_NOTES)
    measured = hops()
    if not measured:
        return "hop: not run, needs two GPUs"
    return write_table(out, "gpu_hop", "One hop between two GPUs", measured, HOP_NOTES)
