"""Ray itself: a local one of our own on loopback, or a cluster that is left running."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray._private.authentication import authentication_token_setup as tokens
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from treeprop_ray.config import RaySettings
from treeprop_ray.core import devices
from treeprop_ray.engine import access
from treeprop_ray.engine.guard import Guard
from treeprop_ray.errors import UserError, first_line
from treeprop_ray.schedule.cluster import Cluster

Answer = TypeVar("Answer")
SPEED = "treeprop-speed"  # a label of a machine: how fast one of its devices is
PEAKS = {
    "H100": 989.0,
    "A100": 312.0,
    "V100": 125.0,
    "L4": 121.0,
    "T4": 65.0,
}  # dense TFLOP/s, half
TASK_EVENTS = 5000  # that Ray's control store remembers; its own default, 100000, takes 330 MB
_guards: list[Guard] = []


class TokenRefused(UserError):
    """The cluster knows another token than ours."""


def start(settings: RaySettings) -> bool:
    """Connect or start Ray; returns whether `stop` should end it."""
    if ray.is_initialized():
        return False
    access.guard()
    with _own_handler():
        return _start(settings)


def _start(settings: RaySettings) -> bool:
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        joined = access.the_only(address)
        try:
            _knock(joined)
            ray.init(address=joined, **quiet)
            if address == "auto":
                print(f"joined the Ray cluster at {joined}", flush=True)
        except AuthenticationError as e:
            raise TokenRefused(
                f"ray.address={address}: the cluster refuses this token (or wants one); give the "
                "cluster's own, which `ray get-auth-token` prints there, as RAY_AUTH_TOKEN with "
                "RAY_AUTH_MODE=token"
            ) from e
        except Exception as e:
            raise UserError(f"ray.address={address}: cannot connect: {first_line(e)}") from e
        return True
    context = ray.init(
        address="local",  # a new one, also beside another Ray on this machine
        num_cpus=settings.num_cpus or None,
        include_dashboard=settings.dashboard,
        dashboard_host="127.0.0.1",
        _node_ip_address="127.0.0.1",
        _system_config={"task_events_max_num_task_in_gcs": TASK_EVENTS},
        **quiet,
    )
    _keep_guard()
    access.close_token()  # Ray has made one, if there was none
    if settings.dashboard:
        url = f"http://{context.dashboard_url}"
        print(f"dashboard: {url} (asks for what `ray get-auth-token` prints)", flush=True)
    return True


@contextlib.contextmanager
def _own_handler() -> Iterator[None]:
    """`ray.init` puts a handler of its own on SIGTERM; ours, which ends a run in order, stays."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _knock(address: str) -> None:
    """Fail at once when nobody answers or our token is wrong; Ray itself tries for long."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    socket.create_connection((host, int(port)), timeout=10).close()
    if "://" not in address:
        logging.getLogger("ray").setLevel(logging.ERROR)
        with _unheard():
            try:
                GcsClient(address=address)
            except AuthenticationError:
                if not _show_token():
                    raise
                GcsClient(address=address)


def _show_token() -> bool:
    """Whether a token is there that was not shown yet; from now on it is.

    Only to a cluster that asks for one: whoever shows a token also wants one from all who call, and
    the servers of a cluster without tokens, which have none, would take this process for dead.
    """
    enable = getattr(tokens, "maybe_enable_token_auth_if_token_available", None)
    return "RAY_AUTH_MODE" not in os.environ and enable is not None and enable(False)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What Ray's C++ part writes to this process's standard error is left out."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def dashboard() -> str:
    """The address of the running Ray's dashboard; empty if it has none."""
    node = ray._private.worker._global_node  # none behind ray://
    url = node.webui_url if node is not None else ""
    return f"http://{url}" if url else ""


def stop() -> None:
    """End the local Ray, or leave the cluster that we had joined."""
    ray.shutdown()
    while _guards:
        _guards.pop().done()


def _keep_guard() -> None:
    """Our own Ray does not outlive this process."""
    session = os.path.basename(ray._private.worker._global_node.get_session_dir_path())
    _guards.append(Guard(session, os.path.dirname(ray.__file__)))


def machines() -> list[str]:
    """The ids of the machines of the running Ray; this one comes first."""
    here = ray.get_runtime_context().get_node_id()
    return sorted((n["NodeID"] for n in ray.nodes() if n["Alive"]), key=lambda i: (i != here, i))


def cluster(avoid: Collection[str] = ()) -> Cluster:
    """What the running Ray has; `avoid`: ids of machines that do not count."""
    nodes = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in avoid]
    have = tuple((n["Resources"].get("CPU", 0.0), n["Resources"].get("GPU", 0.0)) for n in nodes)
    speeds = speeds_of([n.get("Labels") or {} for n in nodes], [gpus > 0 for _, gpus in have])
    return Cluster(have, speeds, tuple(n["NodeID"] for n in nodes) if speeds else ())


def speeds_of(labels: Sequence[Mapping[str, str]], gpus: Sequence[bool]) -> tuple[float, ...]:
    """How fast a device of each machine is, by its label (`ray start --labels treeprop-speed=0.4`),
    else by the type of its GPUs; empty where all are alike or somebody's is not known. Machines
    without GPUs and label have speed 0 beside others with GPUs: they get no blocks."""
    speeds = []
    for own, has_gpu in zip(labels, gpus, strict=True):
        peak = PEAKS.get(own.get("ray.io/accelerator-type", ""), 0.0)
        try:
            speed = float(own.get(SPEED, peak / PEAKS["A100"]))
        except ValueError:
            raise UserError(f"label {SPEED}={own[SPEED]}: a number above 0") from None
        if speed == 0 and has_gpu:
            return ()
        speeds.append(speed)
    return tuple(speeds) if len(set(speeds)) > 1 else ()


def on_gpu(work: Callable[..., Answer], *words: Any) -> Answer:
    """Run something where a GPU is: in this process, or in a task of the running cluster."""
    if devices.gpus.available():
        return work(*words)
    there: Answer = ray.get(ray.remote(num_gpus=1, max_retries=0)(work).remote(*words))
    return there


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
    return Cluster(((float(settings.num_cpus or cores), float(devices.gpus.count())),))
