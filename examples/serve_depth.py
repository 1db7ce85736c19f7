"""Serve a trained tree with Ray Serve: when many requests wait, answers come from fewer blocks.

    treeprop train experiment=cifar10_vit_small objective=node_all_ce name=served
    treeprop evaluate run=results/runs/served mode=adaptive    # calibrates the exits
    cd examples && serve run serve_depth:app run=../results/runs/served    # of ray[serve]
    python serve_load.py run=../results/runs/served            # beside it: depth over load
A request is a POST of {"image": …}, the numbers that the network takes (export's input_shape).
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from treeprop_ray.inference.adaptive import early_exit


class DepthServer:
    def __init__(self, run: str, deep: float = 3, shallow: float = 1, crowd: float = 64) -> None:
        self.network: Any = early_exit(run)
        self.deep, self.shallow, self.crowd = deep, shallow, crowd  # crowd: waiting requests
        self.queue: asyncio.Queue[tuple[torch.Tensor, asyncio.Future[Any]]] = asyncio.Queue()
        self.worker: asyncio.Task[None] | None = None

    def blocks(self, waiting: int) -> float:
        """Mean blocks for a sample: from deep, with nobody behind, to shallow in a crowd."""
        share = min(1.0, (waiting - 1) / (self.crowd - 1))
        return self.deep + share * (self.shallow - self.deep)

    async def work(self) -> None:
        while True:
            batch = [await self.queue.get()]
            blocks = self.blocks(len(batch) + self.queue.qsize())
            while len(batch) < self.crowd and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            x = torch.stack([image for image, _ in batch])
            said = await asyncio.to_thread(self.network, x, blocks)
            told = {"label": said.labels, "confidence": said.confidence, "blocks": said.blocks}
            for k, (_, answer) in enumerate(batch):
                own = {key: values[k].item() for key, values in told.items()}
                answer.set_result({**own, "budget": blocks})

    async def answer(self, image: torch.Tensor) -> Any:
        self.worker = self.worker or asyncio.create_task(self.work())
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self.queue.put((image, waiting))
        return await waiting

    async def __call__(self, request: Any) -> Any:
        return await self.answer(torch.tensor((await request.json())["image"]))


def app(words: dict[str, str]) -> Any:
    from ray import serve

    numbers = {key: float(words[key]) for key in ("deep", "shallow", "crowd") if key in words}
    return serve.deployment(DepthServer, max_ongoing_requests=1000).bind(words["run"], **numbers)
