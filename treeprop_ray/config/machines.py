"""Settings of processes and devices; their keys have no prefix. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treeprop_ray.config.fields import group, opt
from treeprop_ray.config.nested import RaySettings
from treeprop_ray.errors import UserError


@dataclass
class Machines:
    """Processes, devices and how they talk to each other."""

    engine: str = opt(
        "local",
        "one process, Ray actors, or (method=bp) Ray Train: data-parallel workers, `hosts` of them",
        choices=["local", "ray", "train"],
        resumable=True,
    )
    placement: str = opt(
        "auto",
        "per_node: an actor per tree node; packed: lines of nodes share actors; auto: whichever "
        "the cost model finds fastest, hosts and (with microbatches) copies too; it says why",
        choices=["auto", "per_node", "packed"],
        resumable=True,
    )
    hosts: int = opt(
        0, "number of actors when packed; 0 = one per device, or auto's", low=0, resumable=True
    )
    head_copies: int = opt(
        0,
        "tree, ray: so many more actors, with copies of the head that answer some levels of the "
        "spine; weights go there and gradients come back at every step",
        low=0,
        later=True,
        resumable=True,
    )
    cpus_per_actor: float = opt(
        0.0, "CPUs each actor asks Ray for; 0 = an equal share", low=0, resumable=True
    )
    gpus_per_actor: float = opt(
        -1.0,
        "GPUs each actor asks Ray for; -1 = an equal share of those there are",
        low=-1,
        resumable=True,
    )
    strategy: str = opt(
        "PACK",
        "how Ray spreads the actors over machines",
        choices=["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        resumable=True,
    )
    transport: str = opt(
        "store",
        "how tensors travel: by the object store and a call of the driver for every wave; stream: "
        "from actor to actor, which run their calls without the driver; auto: stream where the "
        "first steps show short calls",
        choices=["store", "stream", "auto"],
        gone=dict.fromkeys(("gloo", "nccl", "nixl"), "Ray Direct Transport; use stream"),
        resumable=True,
    )
    in_flight: int = opt(2, "steps the driver submits ahead", low=1, high=64, resumable=True)
    snapshot_every: int = opt(
        50, "steps between recovery points in memory (ray)", low=1, resumable=True
    )
    keep_steps: bool = opt(
        True,
        "with replicas: actors keep their states of the last in_flight + 1 steps in memory, so "
        "that a loss repeats no more than these; costs a copy of the state per step (ray)",
        resumable=True,
    )
    max_failures: int = opt(
        8, "lost actors a run recovers from before it stops (ray)", low=0, resumable=True
    )
    elastic: bool = opt(
        False,
        "use machines that join: at a recovery point, as many copies as fit, the batch cut into "
        "the same replicas * microbatches pieces (ray)",
        resumable=True,
    )
    wave_timeout: float = opt(
        600.0, "seconds after which a late actor is taken for lost and made anew (ray)", above=0,
        resumable=True,
    )  # fmt: skip
    timeline_steps: int = opt(
        3, "last steps drawn in timeline.json and waves.png; 0 = none", low=0, resumable=True
    )
    ray: RaySettings = group(RaySettings)
    device: str = opt(
        "auto",
        "auto takes a GPU when there is one",
        choices=["auto", "cpu", "cuda"],
        resumable=True,
    )
    precision: str = opt(
        "float32",
        "bf16, fp16: autocast of the blocks; fp16 with a loss scale that halves when a gradient "
        "overflows (the step is left out) and doubles after 2000 steps",
        choices=["float32", "bf16", "fp16", "float64"],
    )
    threads: int = opt(1, "torch threads per process", low=1, high=1024, resumable=True)
    microbatches: int = opt(1, "pieces a batch is cut into; gradients add up", low=1)
    replicas: int = opt(
        1,
        "copies of all actors, each with its share of every batch, cut into `microbatches`; the "
        "weights are those of replicas * microbatches micro-batches in one process",
        low=1,
        later=True,
    )
    shard_optimizer: bool = opt(
        False,
        "each copy keeps and updates its share of the optimizer's state; weights travel in place "
        "of gradients",
        resumable=True,
    )
    reduce: str = opt(
        "exact",
        "how copies add up gradients: exact: in the order of one process; fast: by all-reduce of "
        "torch.distributed (nccl, gloo), which is less memory and traffic and another rounding",
        choices=["exact", "fast"],
        later=True,
    )
    recompute: bool = opt(
        False,
        "tree, bp: activation checkpointing; a block keeps its input only and runs again in the "
        "backward",
        resumable=True,
    )
    compile: bool = opt(
        False,
        "tree, bp, cff: torch.compile of every block; another rounding, so not bit for bit what it "
        "is without, nor from machine to machine; falls back with a warning",
        resumable=True,
    )
    compile_backend: str = opt(
        "inductor",
        "what compiles; aot_eager and eager need no compiler (to look for mistakes)",
        choices=["inductor", "aot_eager", "eager"],
        resumable=True,
    )

    def check(self) -> None:
        """A backend is for compiling, and copies must be there to be added up."""
        if self.replicas == 1 and (self.shard_optimizer or self.reduce != "exact"):
            word = "shard_optimizer=true" if self.shard_optimizer else f"reduce={self.reduce}"
            raise UserError(f"{word}: is about copies; needs replicas of at least 2")
        if self.reduce != "exact" and self.engine == "local":
            raise UserError(f"reduce={self.reduce}: one process has one order; use engine=ray")
        if self.compile_backend != "inductor" and not self.compile:
            raise UserError(f"compile_backend={self.compile_backend}: needs compile=true")
