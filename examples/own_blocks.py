"""Train your own blocks: a small residual convolutional stack on scikit-learn's digits.

python examples/own_blocks.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from treeprop_ray import TreeNetwork, fit


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


def main() -> dict[str, float]:
    torch.manual_seed(1)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[360:], order[:360]

    stem = nn.Conv2d(1, 16, 3, stride=2, padding=1)
    blocks = [Residual(16) for _ in range(7)]
    head = nn.Sequential(nn.GroupNorm(4, 16), nn.Flatten(), nn.Linear(16 * 4 * 4, 10))

    network = TreeNetwork.from_blocks(stem, blocks, head, example=x[:2])
    result = fit(network, x[train], y[train], epochs=12, objective="node_all_ce", sigma=0.005)
    print(result.history[["step", "loss"]].tail(1).to_string(index=False))

    accuracy = {}
    for name, path in network.tree.named_paths.items():
        chain = network.path(path).eval()  # a plain nn.Sequential
        with torch.no_grad():
            accuracy[name] = (chain(x[test]).argmax(1) == y[test]).float().mean().item()
        print(f"{name:8} {path}: {100 * accuracy[name]:.1f} % of the test digits")
    torch.save(network.chain().state_dict(), "own_blocks.pt")
    return accuracy


if __name__ == "__main__":
    main()
