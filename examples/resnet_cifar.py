"""A small ResNet on CIFAR-10: stages of growing width, and short paths that end in each of them.

python examples/resnet_cifar.py            # needs $TREEPROP_DATA or the Hugging Face hub
"""

import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray import Fitted, TreeNetwork, config, fit
from treeprop_ray.data import load


class Residual(nn.Module):
    """GroupNorm in place of BatchNorm: nothing depends on the other samples of a batch."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        stride = b // a  # twice the channels on half as many rows and columns
        self.body = nn.Sequential(
            nn.GroupNorm(8, a), nn.ReLU(), nn.Conv2d(a, b, 3, stride, padding=1),
            nn.GroupNorm(8, b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1),
        )  # fmt: skip
        self.skip = nn.Identity() if a == b else nn.Conv2d(a, b, 1, stride)

    def forward(self, z: Tensor) -> Tensor:
        return self.skip(z) + self.body(z)


def main(limit: int = 5000, blocks: int = 7, **settings: Any) -> Fitted:
    torch.manual_seed(1)
    data = load(config.load(["experiment=cifar10_vit_small", f"data.limit={limit}"]))
    x, y = data.prepare(data.train.x), data.train.y
    held = data.prepare(data.validation.x), data.validation.y
    width = [32 * 2 ** (3 * i // (blocks + 1)) for i in range(blocks + 1)]  # of every state
    chain = [Residual(a, b) for a, b in pairwise(width)]
    head = nn.Sequential(
        nn.GroupNorm(8, width[-1]), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width[-1], 10)
    )
    exits = {w: nn.Conv2d(w, width[-1], 1) for w in set(width) - {width[-1]}}  # into its form
    network = TreeNetwork.from_blocks(
        nn.Conv2d(3, width[0], 4, stride=4), chain, head, example=x[:2],
        auxiliary=lambda l, r: Residual(width[l], width[r]), exits=lambda n: exits.get(width[n]),
    )  # fmt: skip
    words = {"epochs": 5, "lr": 2e-3, "objective": "node_all_ce", "sigma": 0.005, **settings}
    result = fit(network, x, y, validation=held, **words)
    for name, score in result.scores["validation"].items():
        path = "-".join(map(str, result.paths[name]))
        print(f"{name:8} {path:20} {100 * score['accuracy']:.1f} % of the held-out images")
    return result


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
