"""Several machines, simulated by Ray on this one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import ray


@contextlib.contextmanager
def machines(count: int) -> Iterator[tuple[Any, list[Any]]]:
    """A cluster of simulated machines with a CPU each; the driver is on the first."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        others = [cluster.add_node(num_cpus=1) for _ in range(count - 1)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster, others
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
