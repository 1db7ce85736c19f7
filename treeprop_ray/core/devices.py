"""The one door to GPUs: nothing else in the package calls torch.cuda.

`gpus` is what is asked. The tests put a stand-in there (tests/fake_gpus.py) whose devices are the
CPU, so that every branch for a GPU is run on a machine without one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

NAME = "cuda"  # as settings and plans call a GPU


class Gpus:
    """The GPUs that this process sees."""

    backend = "nccl"  # of torch.distributed, between GPUs

    def count(self) -> int:
        """How many."""
        return torch.cuda.device_count()

    def names(self) -> list[str]:
        """What they are called."""
        return [torch.cuda.get_device_name(i) for i in range(self.count())]

    def available(self) -> bool:
        """Whether torch can use one."""
        return torch.cuda.is_available()

    def build(self) -> str:
        """The CUDA version that torch is made for; empty for a CPU build."""
        return torch.version.cuda or ""

    def memory(self, index: int) -> int:
        """Bytes of a GPU."""
        return int(torch.cuda.get_device_properties(index).total_memory)

    def bf16(self) -> bool:
        """Whether this process's GPU computes in bfloat16."""
        return torch.cuda.is_bf16_supported()

    def device(self, name: str) -> torch.device:
        """The device of a plan."""
        return torch.device(name)

    def is_gpu(self, device: torch.device) -> bool:
        """Whether that is a GPU."""
        return device.type == NAME

    def uuid(self, device: torch.device) -> str:
        """Which GPU that is, the same for all processes that use it."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def seed(self, seed: int) -> None:
        """Randomness on the current GPU comes from `seed` from now on."""
        torch.cuda.manual_seed(seed)

    def rng(self, device: torch.device) -> Tensor:
        """The state of a GPU's generator."""
        return torch.cuda.get_rng_state(device)

    def set_rng(self, state: Tensor, device: torch.device) -> None:
        """Put such a state back."""
        torch.cuda.set_rng_state(state, device)

    def wait(self) -> None:
        """Until the GPU has done all that it was given."""
        torch.cuda.synchronize()

    def forget_peak(self) -> None:
        """Begin a new measurement of `peak`."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The most bytes that this process's tensors have taken at a time."""
        return torch.cuda.max_memory_allocated()

    def group(self, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
        """A group of processes that send from GPU to GPU."""
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, world, options)


gpus = Gpus()
