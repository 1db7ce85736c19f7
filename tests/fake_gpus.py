"""A stand-in for the door to GPUs (core/devices.py): two devices that are this CPU.

Every question about GPUs is answered, every call is counted, and tensors stay where they are; so
the branches for a GPU run here, in this process and, by `install`, in Ray's workers.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from treeprop_ray.core import devices


class FakeGpus(devices.Gpus):
    """Two GPUs of 8 GB."""

    backend = "gloo"

    def __init__(self, here: bool = True) -> None:
        """`here`: whether this process sees them."""
        self.here, self.calls = here, Counter[str]()

    def count(self) -> int:
        return 2 if self.here else 0

    def names(self) -> list[str]:
        return ["Fake"] * self.count()

    def available(self) -> bool:
        return self.here

    def build(self) -> str:
        return "13.0"

    def memory(self, index: int) -> int:
        return 8 * 10**9

    def bf16(self) -> bool:
        return True

    def device(self, name: str) -> torch.device:
        self.calls[f"device {name}"] += 1
        return torch.device("cpu")

    def is_gpu(self, device: torch.device) -> bool:
        return True

    def uuid(self, device: torch.device) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "0")  # Ray gives every actor its own

    def seed(self, seed: int) -> None:
        self.calls["seed"] += 1

    def rng(self, device: torch.device) -> Tensor:
        self.calls["rng"] += 1
        return torch.arange(3)

    def set_rng(self, state: Tensor, device: torch.device) -> None:
        assert state.tolist() == [0, 1, 2]
        self.calls["set_rng"] += 1

    def wait(self) -> None:
        self.calls["wait"] += 1

    def forget_peak(self) -> None:
        self.calls["forget_peak"] += 1

    def peak(self) -> int:
        return 10**9

    def group(self, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
        return distributed.ProcessGroupGloo(store, rank, world, timeout)


def install() -> None:
    """In a worker of Ray, before anything else."""
    devices.gpus = FakeGpus()
