"""Which machines of a cluster can reach each other.

In a partial partition two machines cannot talk while both reach the head: Ray counts both as alive,
and a wave between them waits for ever. Small actors, one per machine, try every pair.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

START_SECONDS = 120  # for the small actors; a machine that has none by then is lost
REACH_SECONDS = 5

Pair = frozenset[str]  # the ids of two machines

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # to import it there would import torch


class Ear:
    """Listens on its machine, and tries to reach others."""

    def __init__(self) -> None:
        self.server = socket.create_server(("", 0))
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            connection, _ = self.server.accept()
            with contextlib.suppress(OSError), connection:
                connection.sendall(b"here")

    def address(self) -> tuple[str, int]:
        """Where others can reach it."""
        return ray.util.get_node_ip_address(), self.server.getsockname()[1]

    def unreached(self, others: Mapping[str, tuple[str, int]]) -> list[str]:
        """Those of the others that do not answer."""
        return [name for name, address in others.items() if not answers(address)]


def answers(address: tuple[str, int]) -> bool:
    """Whether somebody says something at an address."""
    try:
        with socket.create_connection(address, timeout=REACH_SECONDS) as connection:
            connection.settimeout(REACH_SECONDS)
            return bool(connection.recv(4))
    except OSError:
        return False


def cut_pairs(machines: Sequence[str]) -> set[Pair]:
    """Pairs of machines, by id, of which one cannot reach the other."""
    kind = ray.remote(num_cpus=0, max_restarts=0)(Ear)
    ears: dict[str, Any] = {
        machine: kind.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False)
        ).remote()
        for machine in machines
    }
    try:
        where = _got({machine: ear.address.remote() for machine, ear in ears.items()})
        told = _got(
            {
                machine: ears[machine].unreached.remote(
                    {other: at for other, at in where.items() if other != machine}
                )
                for machine in where
            }
        )
    finally:
        for ear in ears.values():
            with contextlib.suppress(Exception):
                ray.kill(ear)
    return {frozenset((machine, other)) for machine, others in told.items() for other in others}


def _got(refs: Mapping[str, Any]) -> dict[str, Any]:
    """The answers that come in time; a machine that gives none is lost, not cut off."""
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=START_SECONDS)
    answers = {}
    for machine, ref in refs.items():
        with contextlib.suppress(RayError):
            answers[machine] = ray.get(ref, timeout=0)
    return answers


def to_avoid(pairs: Collection[Pair], home: str) -> set[str]:
    """Machines without which no cut pair is left: those with most cuts first, `home` never."""
    left, avoided = set(pairs), set()
    while left:
        counts: dict[str, int] = {}
        for pair in left:
            for machine in pair - {home}:
                counts[machine] = counts.get(machine, 0) + 1
        worst = max(sorted(counts), key=lambda machine: counts[machine])
        avoided.add(worst)
        left = {pair for pair in left if worst not in pair}
    return avoided
