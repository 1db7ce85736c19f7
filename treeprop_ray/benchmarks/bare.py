"""Two plain processes that hand a tensor to and fro: what a wire costs without actors and Ray."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from treeprop_ray.benchmarks.alarm import Alarm
from treeprop_ray.engine.wire import Wire

PATIENCE = 600.0  # seconds
BEAT = 0.05  # seconds in which all hops of a beat are done
TOKEN = bytes(32)  # the processes are our own, on loopback

Send = Callable[[Tensor], None]
Receive = Callable[[], None]


def gloo(rank: int, pipe: Any) -> Callable[[Tensor], tuple[Send, Receive]]:
    """torch.distributed's send and recv."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = TCPStore("127.0.0.1", pipe.recv())
    group: Any = ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE))
    other = 1 - rank

    def ends(like: Tensor) -> tuple[Send, Receive]:
        room = torch.empty_like(like)
        return (
            lambda t: group.send([t], other, 0).wait(),
            lambda: group.recv([room], other, 0).wait(),
        )

    return ends


def wire(shares: bool, rank: int, pipe: Any) -> Callable[[Tensor], tuple[Send, Receive]]:
    """The wire of transport=stream by itself."""
    mine = Wire("127.0.0.1", TOKEN, PATIENCE, shares)
    pipe.send(mine.address)
    theirs = pipe.recv()
    mine.join(rank, [mine.address, theirs] if rank == 0 else [theirs, mine.address], [1 - rank])

    def ends(like: Tensor) -> tuple[Send, Receive]:
        def receive() -> None:
            mine.take(1 - rank)

        return lambda t: mine.send(1 - rank, [t]), receive

    return ends


def serve(make: Any, rank: int, beside: Any, pipe: Any) -> None:
    """The life of one of the two: `floats` and how many hops, until there is nothing to do."""
    torch.set_num_threads(1)
    sleep = Alarm()
    ends = make(rank, beside)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        floats, hops, pause, together = asked
        tensor = torch.zeros(floats)
        send, receive = ends(tensor)
        if together:
            pipe.send(on_the_beat(rank, send, receive, tensor, hops, pause, sleep))
            continue
        began = time.perf_counter()
        for hop in range(hops):
            if hop % 2 == rank:
                if pause > 0:
                    sleep(pause)
                send(tensor)
            else:
                receive()
        pipe.send((time.perf_counter() - began) / hops - pause)


def on_the_beat(
    rank: int, send: Send, receive: Receive, tensor: Tensor, hops: int, pause: float, sleep: Alarm
) -> float:
    """Seconds of a hop where all pairs of the machine begin to sleep at the same time: from when
    the sleep should end to when the packet is there."""
    beat, taken = pause + BEAT, []
    time.sleep(3 * BEAT - time.monotonic() % BEAT)
    for hop in range(hops):
        if hop % 2 == rank:
            time.sleep(beat - time.monotonic() % beat)
            left = pause - time.monotonic() % beat
            if left > 0:
                sleep(left)
            send(tensor)
        else:
            receive()
            taken.append(time.monotonic() % beat - pause)
    return sum(taken) / len(taken)


class Pair:
    """Two processes and what connects them."""

    def __init__(self, make: Any) -> None:
        server = multiprocessing.get_context("forkserver")  # imports torch once for all pairs
        server.set_forkserver_preload([__name__])
        between = server.Pipe()
        self.pipes, self.processes = [], []
        for rank in range(2):
            mine, theirs = server.Pipe()
            process = server.Process(
                target=serve, args=(make, rank, between[rank], theirs), daemon=True
            )
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def seconds(self, floats: int, hops: int, pause: float = 0.0) -> float:
        """Seconds of a hop of so many floats, beyond a pause of the sender before it."""
        self.begin(floats, hops, pause, False)
        return self.end()

    def begin(self, floats: int, hops: int, pause: float, together: bool = True) -> None:
        """Have them hop; `together`: at the same time as others that are begun so."""
        for pipe in self.pipes:
            pipe.send((floats, hops, pause, together))

    def end(self) -> float:
        """What `seconds` gives, of the hops that were begun."""
        return max(float(pipe.recv()) for pipe in self.pipes)

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)
