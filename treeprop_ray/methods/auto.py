"""placement=auto for a run: its blocks are weighed, and the planner chooses."""

from __future__ import annotations

from collections.abc import Callable

from treeprop_ray.config import Settings
from treeprop_ray.errors import UserError, first_line
from treeprop_ray.methods.base import of
from treeprop_ray.methods.job import Job
from treeprop_ray.methods.weighing import CORE, GPU, Anatomy, anatomy_of, anatomy_of_job, workload
from treeprop_ray.schedule.auto import Choice, choose, undecided, with_copies
from treeprop_ray.schedule.cluster import Cluster


def decided(
    settings: Settings, cluster: Cluster, anatomy: Callable[[], Anatomy] | None = None
) -> Choice:
    """Settings whose plan is decided, if they leave it to us. Blocks are timed here where cores are
    the devices, and counted for GPUs; where that fails every device gets an actor, as with hosts=0
    placement=packed."""
    if not (undecided(settings) and of(settings).planned):
        return Choice(settings)
    on_gpu = cluster.gpus > 0 and settings.device != "cpu"
    try:
        parts = anatomy() if anatomy else anatomy_of(settings)
        work = workload(settings, parts, GPU if on_gpu else CORE, 0.0 if on_gpu else 1.0)
    except Exception as e:  # the user's own modules may raise anything without numbers
        return Choice(settings, (f"placement=auto: not weighed ({first_line(e)}): all devices",))
    copies = [s.replicas for s in with_copies(settings) if suits(s)]
    return choose(settings, work, cluster, copies, suits)


def suits(settings: Settings) -> bool:
    """Whether the method takes these settings: not all of them can be copied."""
    try:
        of(settings).check(settings)
    except UserError:
        return False
    return True


def decided_for(job: Job, cluster: Cluster) -> Choice:
    """The same for a job, whose network may be at hand."""
    return decided(job.settings, cluster, lambda: anatomy_of_job(job))
