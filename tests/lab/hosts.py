"""A Ray cluster over hosts with addresses of their own, and what is done to it. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.nemesis import Fault
from lab.switch import Link, Switch

PORT = 6379
START_SECONDS = 300
BIN = Path(sys.executable).parent
# Ray looks after its hosts every second, so that a lost one is known soon; its workers are not
# nicer than others, so that a busy machine does not make them late
SOON = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
}


class Cluster:
    """`ray start` on every host; the first is the head, where the driver runs."""

    def __init__(self, hosts: int, folder: Path, paths: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        token = folder / "token"
        token.write_text(uuid.uuid4().hex)
        token.chmod(0o600)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            **SOON,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "GLOO_SOCKET_IFNAME": "tp0",
            "PYTHONPATH": paths,
            "RAY_TMPDIR": f"/tmp/tp{os.getpid()}",
        }
        self.switch = Switch(hosts)
        self.folder, self.counter = folder, itertools.count()
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.hurt: set[int] = set()  # hosts that the head has given up

    @property
    def address(self) -> str:
        """Where the head listens."""
        return f"{self.switch.hosts[0].address}:{PORT}"

    def exported(self) -> list[str]:
        """What a driver's environment needs."""
        keys = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "GLOO_SOCKET_IFNAME", "RAY_TMPDIR")
        return [f"{key}={self.env[key]}" for key in keys]

    def start(self, number: int) -> None:
        """`ray start` on a host; the head first."""
        host = self.switch.hosts[number]
        # no actor lives on the head, so that the other two hosts always have something to exchange
        where = ["--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=0"]
        if number:
            where = [f"--address={self.address}", "--num-cpus=1"]
        command = [str(BIN / "ray"), "start", "--block", *where,
                   f"--node-ip-address={host.address}", "--disable-usage-stats"]  # fmt: skip
        log = self.folder / f"ray-{number}-{next(self.counter)}.log"
        with log.open("w") as out:
            node = self.nodes[number] = host.popen(*command, env=self.env, stdout=out, stderr=out)
        # one after the other: two that start at once take each other's sockets in the same folder
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text():
            if node.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"host {number} has not come up: {log.read_text()[-300:]}")
            time.sleep(0.2)

    def wait_for(self, count: int) -> None:
        """Until so many hosts have joined."""
        code = (
            "import ray, sys, time; ray.init(address=sys.argv[1], log_to_driver=False)\n"
            f"while sum(n['Alive'] for n in ray.nodes()) < {count}: time.sleep(0.5)"
        )
        command = self.switch.hosts[0].inside(sys.executable, "-c", code, self.address)
        subprocess.run(command, env=self.env, check=True, capture_output=True, timeout=600)

    def lose(self, number: int) -> None:
        """All processes of a host end at once."""
        node = self.nodes[number]
        inside = subprocess.run(
            ["ip", "netns", "pids", self.switch.hosts[number].name], capture_output=True, text=True
        )
        spared = driver_pids() if number == 0 else set()
        for pid in map(int, inside.stdout.split()):
            if pid not in spared:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        node.wait()

    def act(self, fault: Fault) -> None:
        """A fault of the network or of a host; those of the network end after a while."""
        number = 1 + fault.number % (len(self.switch.hosts) - 1)
        others = [k for k in range(len(self.switch.hosts)) if k != number]
        both = [(number, k) for k in others] + [(k, number) for k in others]
        a, b = 1, 2
        match fault.kind:
            case "cut":
                self.switch.set(both, Link(cut=True))
                self.hurt.add(number)
            case "cut_pair":
                self.switch.set([(a, b), (b, a)], Link(cut=True))
            case "one_way":
                self.switch.set([(a, b)], Link(cut=True))
            case "slow":
                self.switch.set(both, Link(delay=0.05))
            case "lossy":
                self.switch.set(both, Link(loss=0.1))
            case "lose_host":
                self.lose(number)
            case "head_loss":
                self.lose(0)
        if fault.kind in ("slow", "lossy"):
            threading.Timer(20, self.switch.heal).start()

    def mend(self) -> None:
        """Links whole, all hosts up; one that was cut off is given up by the head and goes."""
        self.switch.heal()
        again = self.hurt | {k for k, node in self.nodes.items() if node.poll() is not None}
        if 0 in again:  # without a head the others are of no use
            again = set(self.nodes)
        for number in sorted(again):
            self.lose(number)
        for number in sorted(again):
            self.start(number)
        self.hurt.clear()
        if again:
            self.wait_for(len(self.switch.hosts))

    def close(self) -> None:
        """End everything."""
        for number in self.nodes:
            with contextlib.suppress(OSError):
                self.lose(number)
        self.switch.close()


def driver_pids() -> set[int]:
    """Drivers of the laboratory, which live on the head's host and are not part of it."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and "lab.driver" in (entry / "cmdline").read_text():
                found.add(int(entry.name))
    return found


@contextlib.contextmanager
def cluster(hosts: int, folder: Path, paths: str) -> Iterator[Cluster]:
    """A cluster for a while."""
    made = Cluster(hosts, folder, paths)
    try:
        for number in range(hosts):
            made.start(number)
        made.wait_for(hosts)
        yield made
    finally:
        made.close()


KINDS = ("cut_pair", "lose_host", "one_way", "cut", "slow", "lossy", "head_loss")
# packets above 100 kB lie in the object stores of the hosts; smaller ones go by way of the driver
BIG = ["model.hidden=64", "batch=512", "data.limit=0", "eval_every=8"]


def fault_of(kind: str, number: int, step: int) -> Fault:
    """A fault that the boundary's host asks for while it trains."""
    return Fault(number, kind, "forward", "host-0", step)


def words_of(made: Cluster, transport: str) -> Sequence[str]:
    """What a run on the cluster is told besides."""
    return [
        "engine=ray", f"ray.address={made.address}", "placement=packed", "hosts=2",
        "cpus_per_actor=1", "strategy=SPREAD", f"transport={transport}", "wave_timeout=20",
    ]  # fmt: skip
