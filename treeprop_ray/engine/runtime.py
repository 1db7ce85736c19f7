"""Ray itself: a local one of our own on loopback, or a cluster that is left running."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import ray
import torch

from treeprop_ray.config import RaySettings
from treeprop_ray.errors import UserError, first_line
from treeprop_ray.schedule.placement import Cluster


def start(settings: RaySettings) -> bool:
    """Connect or start Ray; returns whether `stop` should end it."""
    if ray.is_initialized():
        return False
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        try:
            _knock(address)
            ray.init(address=address, **quiet)
        except Exception as e:
            raise UserError(f"ray.address={address}: cannot connect: {first_line(e)}") from e
        return True
    context = ray.init(
        address="local",  # a new one, also beside another Ray on this machine
        num_cpus=settings.num_cpus or None,
        include_dashboard=settings.dashboard,
        dashboard_host="127.0.0.1",
        _node_ip_address="127.0.0.1",
        **quiet,
    )
    if settings.dashboard:
        url = f"http://{context.dashboard_url}"
        print(f"dashboard: {url} (asks for what `ray get-auth-token` prints)", flush=True)
    return True


def _knock(address: str) -> None:
    """Fail at once when nobody answers; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def stop() -> None:
    """End the local Ray, or leave the cluster that we had joined."""
    ray.shutdown()


def cluster() -> Cluster:
    """What the running Ray has."""
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    return Cluster(tuple((n.get("CPU", 0.0), n.get("GPU", 0.0)) for n in nodes))


def cluster_of(settings: RaySettings) -> Cluster:
    """What the settings' cluster has; a local Ray is not started for the question."""
    if settings.address or os.environ.get("RAY_ADDRESS"):
        joined = start(settings)
        try:
            return cluster()
        finally:
            if joined:
                stop()

    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return Cluster(((float(settings.num_cpus or cores), float(torch.cuda.device_count())),))
