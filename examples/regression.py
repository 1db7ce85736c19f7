"""Regression with a DataLoader: how far diabetes goes on in a year, from ten measurements.

python examples/regression.py
"""

from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from treeprop_ray import Fitted, TreeNetwork, fit

WIDTH = 32


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, z: Tensor) -> Tensor:
        return z + self.body(z)


def mean_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


def main(blocks: int = 7, **settings: Any) -> Fitted:
    torch.manual_seed(1)
    diabetes = load_diabetes()
    x = torch.tensor(diabetes.data, dtype=torch.float32) * 20  # of deviation about 1
    y = torch.tensor(diabetes.target, dtype=torch.float32).unsqueeze(1) / 100
    order = torch.randperm(len(x))
    held, rest = order[:90], order[90:]
    loader = DataLoader(TensorDataset(x[rest], y[rest]), batch_size=32, shuffle=True)

    chain = [Residual() for _ in range(blocks)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))
    network = TreeNetwork.from_blocks(nn.Linear(10, WIDTH), chain, head, example=x[:2])
    words = {"epochs": 10, "lr": 1e-3, "weight_decay": 0.1, "sigma": 0.005, **settings}
    result = fit(
        network, loader, validation=(x[held], y[held]), loss="mse",
        metrics={"mean error": mean_error}, **words,
    )  # fmt: skip
    for name, score in result.scores["validation"].items():
        print(f"{name:8} squared error {score['loss']:.3f}, mean error {score['mean error']:.3f}")
    print(f"squared error of the mean: {float(y[held].var()):.3f}")
    return result


if __name__ == "__main__":
    main()
