"""A small residual network on CIFAR-10, all of its blocks of one shape, with every short path.

python examples/resnet_cifar.py            # needs $TREEPROP_DATA or the Hugging Face hub
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray import Fitted, TreeNetwork, config, fit
from treeprop_ray.data import load

CHANNELS = 32


class Residual(nn.Module):
    """GroupNorm in place of BatchNorm: nothing depends on the other samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, CHANNELS), nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.GroupNorm(8, CHANNELS), nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        )  # fmt: skip

    def forward(self, z: Tensor) -> Tensor:
        return z + self.body(z)


def main(limit: int = 5000, blocks: int = 7, **settings: Any) -> Fitted:
    torch.manual_seed(1)
    data = load(config.load(["experiment=cifar10_vit_small", f"data.limit={limit}"]))
    x, y = data.prepare(data.train.x), data.train.y
    held_x, held_y = data.prepare(data.validation.x), data.validation.y
    stem = nn.Conv2d(3, CHANNELS, 4, stride=4)  # 8 x 8 positions, the same in every block
    head = nn.Sequential(
        nn.GroupNorm(8, CHANNELS), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10)
    )
    chain = [Residual() for _ in range(blocks)]
    network = TreeNetwork.from_blocks(stem, chain, head, example=x[:2])
    words = {"epochs": 5, "lr": 2e-3, "objective": "node_all_ce", "sigma": 0.005, **settings}
    result = fit(network, x, y, validation=(held_x, held_y), **words)
    for name, score in result.scores["validation"].items():
        path = "-".join(map(str, result.paths[name]))
        print(f"{name:8} {path:20} {100 * score['accuracy']:.1f} % of the held-out images")
    return result


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
