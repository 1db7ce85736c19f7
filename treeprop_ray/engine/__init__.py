"""Three engines: in one process, on Ray actors, data-parallel."""

from __future__ import annotations

from collections.abc import Callable

from treeprop_ray.engine import runtime
from treeprop_ray.engine.base import Engine
from treeprop_ray.engine.data_parallel import DataParallelEngine
from treeprop_ray.engine.local import LocalEngine
from treeprop_ray.engine.ray import RayEngine
from treeprop_ray.methods import Job

__all__ = ["DataParallelEngine", "Engine", "LocalEngine", "RayEngine", "build"]


def build(job: Job, way_on: Callable[[], str] | None = None) -> Engine:
    """The engine that the settings name; for Ray, start it or join a cluster. With `way_on` the
    process ends with that line when the Ray that the engine runs on is gone."""
    if job.settings.engine == "local":
        return LocalEngine(job)
    if job.settings.engine == "train":  # inside a worker
        return DataParallelEngine(job)
    owns_ray = runtime.start(job.settings.ray)
    try:
        return RayEngine(job, owns_ray, way_on)
    except BaseException:
        if owns_ray:
            runtime.stop()
        raise
