"""Your own recurrent cell from the command line: every block is a step over more pixels.

python examples/own_cell.py     # model.name=own_cell:network names the factory below
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from treeprop_ray import Blueprint
from treeprop_ray.train import main as train

WIDTH = 32


class Step(nn.Module):
    """A minimal gated unit over pixels[first:last]; the state is (hidden, picture) side by side."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.gate = nn.Linear(WIDTH + last - first, WIDTH)
        self.new = nn.Linear(WIDTH + last - first, WIDTH)

    def forward(self, z: Tensor) -> Tensor:
        h, picture = z[:, :WIDTH], z[:, WIDTH:]
        seen = torch.cat([h, picture[:, self.first : self.last]], 1)
        keep = torch.sigmoid(self.gate(seen))
        return torch.cat([keep * h + (1 - keep) * torch.tanh(self.new(seen)), picture], 1)


class Begin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x.flatten(1), (WIDTH, 0))  # no hidden state yet


class Read(nn.Linear):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z[:, :WIDTH])


def network(model, shape) -> Blueprint:
    """N - 1 steps over the 64 pixels; a longer edge reads all the pixels that it spans."""
    N = model.blocks + 1
    pixels = [round(64 * n / model.blocks) for n in range(N)]
    return Blueprint(N, Begin, lambda l, r: Step(pixels[l], pixels[r]), lambda: Read(WIDTH, 10))


def main(*words: str) -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    own = ["model.name=own_cell:network", "model.blocks=7", "family=gaussian", "name=own_cell"]
    return train([*own, "objective=node_all_ce", "lr=0.003", "epochs=20", *words])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
