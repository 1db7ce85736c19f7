"""Your own recurrent cell through time: one cell, shared by all steps, reads digits as sequences.

python examples/own_cell.py                # TreeProp: a cell for each depth of a tree over time
python examples/own_cell.py method=bptt    # backpropagation through time of the same cell
PYTHONPATH=examples treeprop export run=results/runs/own_cell   # cell.safetensors: its weights
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from treeprop_ray.train import main as train


class MinimalGated(nn.Module):
    """A gate that keeps the state or takes a candidate; any module (x, h) -> h will do."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs + hidden, hidden)
        self.new = nn.Linear(inputs + hidden, hidden)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        keep = torch.sigmoid(self.gate(torch.cat([x, h], 1)))
        return keep * h + (1 - keep) * torch.tanh(self.new(torch.cat([x, keep * h], 1)))


def cell(model, inputs: int) -> nn.Module:
    """The cell of a depth, which reads `inputs` numbers at a step; that of depth 0 is deployed."""
    return MinimalGated(inputs, model.hidden)


def main(*words: str) -> int:
    sys.path.insert(0, str(Path(__file__).parent))  # model.name=own_cell:cell is `cell` above
    own = ["experiment=digits_gru", "model.name=own_cell:cell", "model.recurrent=true"]
    return train([*own, "name=own_cell", *words])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
