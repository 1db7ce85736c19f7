"""How the answers of a path are read: an affine map of its logits, and a temperature.

The shared head serves all paths at once and suits none of them best. For each path an affine map is
fitted to samples of the training split (a convex problem, held near "as they are"). The validation
split decides whether it is used, and sets the temperature; where a network has learnt its training
samples by heart, the map is of no use there and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from treeprop_ray.data import DataSet
from treeprop_ray.data.streams import Stream
from treeprop_ray.inference.early_exit import Readout, beside, read
from treeprop_ray.inference.outcome import Views

SAMPLES = 5000  # of the training split, at most
RIDGE = 0.001  # pull of the map towards the identity
ROUNDS = 50  # of L-BFGS, at most
COOLEST, HOTTEST = 1e-3, 1e3  # temperatures


def training_batches(data: DataSet) -> Iterator[tuple[Tensor, Tensor]]:
    """The first samples of the training split, as they are when they are scored; none of a stream,
    which cannot be asked for them."""
    if isinstance(data.train, Stream):
        return
    count = 0
    for index in range(data.batch_counts["train"]):
        if count >= SAMPLES:
            return
        x, y = data.scoring("train", index)
        count += y.numel()
        yield x, y


def fit_map(paths: Sequence[Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    """Matrix and bias of the affine map with the least log-loss on the logits (samples, classes) of
    some paths side by side; held near the last of them as it is."""
    x, classes = beside(paths), paths[-1].shape[-1]
    identity = torch.eye(classes, x.shape[-1], dtype=x.dtype).roll(x.shape[-1] - classes, 1)
    matrix = identity.clone().requires_grad_(True)
    bias = torch.zeros(classes, dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([matrix, bias], max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        pull = 0.5 * RIDGE * (matrix - identity).square().sum()
        value = cross_entropy(x @ matrix.T + bias, y) + pull
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return matrix.detach(), bias.detach()


def at_best_temperature(readout: Readout, logits: Tensor, y: Tensor) -> tuple[Readout, float]:
    """A reading at the temperature of least log-loss, and that loss: Newton's method on one
    number, the inverse temperature, in which the loss is convex."""
    said, scale = read(logits, readout), 1.0
    of_label = said.gather(-1, y[:, None])[:, 0]
    for _ in range(ROUNDS):
        p = (scale * said).softmax(-1)
        mean = (p * said).sum(-1)
        slope = float((mean - of_label).mean())
        bend = float(((p * said.square()).sum(-1) - mean.square()).mean())
        step = slope / max(bend, 1e-9)
        scale = min(max(scale - step, scale / 4), scale * 4)  # it stays positive
        if abs(step) < 1e-6 * scale:
            break
    scale = min(max(scale, 1 / HOTTEST), 1 / COOLEST)
    loss = float(cross_entropy(scale * said, y))
    return Readout(readout.temperature / scale, readout.matrix, readout.bias), loss


def readouts(views: Views, training: Views | None = None) -> list[Readout]:
    """For every path; `views` of the validation split, `training` of some training samples."""
    found = []
    for i, logits in enumerate(views.logits):
        best = at_best_temperature(Readout(1.0), logits, views.y)
        if training is not None:
            matrix, bias = fit_map([training.logits[i]], training.y)
            mapped = Readout(1.0, as_tuples(matrix), tuple(bias.tolist()))
            best = min(
                best, at_best_temperature(mapped, logits, views.y), key=lambda offer: offer[1]
            )
        found.append(best[0])
    return found


def as_tuples(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    """Rows of a matrix."""
    return tuple(tuple(row) for row in matrix.tolist())


def through(views: Views, reading: Iterable[Readout]) -> Views:
    """The same with log-probabilities as they are read, in place of logits."""
    said = [read(x, readout) for x, readout in zip(views.logits, reading, strict=True)]
    return Views(views.paths, torch.stack(said), views.y)
