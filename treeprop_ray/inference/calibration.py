"""Which exits, readings, weights and thresholds a network should use, by its validation split.

1. Every path of the tree (of large trees: those with names) gets a reading of its logits
   (readout.py): a map fitted to training samples where validation wants it, and a temperature.
2. Exits are added one by one: the path that improves the answer most for each block that it costs
   beyond what has been run, as long as one does and no more blocks run than the full chain has.
   Which one is asked of least squares, fitted to training samples and judged by validation.
3. The answer at an exit is an affine map of the logits of all exits so far, fitted to training
   samples; or a weighted sum of log-probabilities, whose weights are fitted to validation; or the
   last exit alone, as the single path that it is: whichever has the least log-loss on validation.
4. For a price of a block, thresholds are set from the last exit to the first: samples above one
   leave if on the whole that is worth more than going on. Many prices give many policies. What an
   answer is worth is its confidence, which is calibrated: right or wrong would be the same on
   average, and a noisier guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot

from treeprop_ray.core.tree import Tree
from treeprop_ray.inference.early_exit import (
    Calibration,
    Exit,
    Policy,
    Readout,
    beside,
    read,
)
from treeprop_ray.inference.outcome import Views, blocks_run, outcome
from treeprop_ray.inference.readout import as_tuples, at_best_temperature, fit_map, through

MOST_PATHS = 32  # beyond that only paths with names are looked at
MOST_EXITS = 8
LEAST_GAIN = 0.003  # share of the log-loss, for an exit to be added
LEAST_SQUARES = 0.0005  # the same where squared errors judge
MOST_INPUTS = 1000  # of a joint map: exits times classes
PULL = 0.01  # of least squares towards 0
RIDGE = 0.02  # pull of the weights towards the last exit alone
NEWTON = 30  # steps at most
PRICES = 200  # of a block, from dear to free
CUTS = 200  # thresholds tried for an exit


def paths_of(tree: Tree) -> dict[str, list[int]]:
    """The paths that may become exits, by name; those without one are called 0-4-5-8."""
    named = tree.named_paths
    known = {tuple(path) for path in named.values()}
    others = [path for path in every_path(tree) if path not in known]
    if len(others) + len(named) > MOST_PATHS:
        return named
    short = {name: path for name, path in named.items() if path != tree.chain}
    return {**short, **{"-".join(map(str, p)): list(p) for p in others}, "full": tree.chain}


def every_path(tree: Tree) -> list[tuple[int, ...]]:
    """All paths, shortest first; of many only some more than are of use."""
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[int, ...]] = [(0,)]
    while waiting and len(found) <= MOST_PATHS:
        begun = waiting.pop(0)
        for l, r in tree.edges:
            if l == begun[-1]:
                (found if r == tree.N else waiting).append((*begun, r))
    return found


def fit_weights(said: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Weights of log-probabilities (exits, samples, classes) of least log-loss, and that loss.

    Newton's method with shorter steps where a whole one leads uphill: the loss is convex.
    """
    count, n, _ = said.shape
    alone = torch.zeros(count, dtype=said.dtype)
    alone[-1] = 1.0
    ridge = RIDGE * torch.eye(count, dtype=said.dtype)
    of_label = said.gather(-1, y.expand(count, n)[..., None])[..., 0]

    def loss(weights: Tensor) -> float:
        total = torch.einsum("k,knc->nc", weights, said).log_softmax(-1)
        return -float(total.gather(-1, y[:, None]).mean())

    def held(weights: Tensor) -> float:
        return loss(weights) + 0.5 * RIDGE * float((weights - alone).square().sum())

    weights, now = alone.clone(), held(alone)
    for _ in range(NEWTON):
        p = torch.einsum("k,knc->nc", weights, said).softmax(-1)
        mean = torch.einsum("nc,knc->kn", p, said)
        slope = (mean - of_label).mean(1) + RIDGE * (weights - alone)
        spread = torch.einsum("inc,jnc->ij", p * said, said) / n - mean @ mean.T / n
        step = torch.linalg.solve(spread + ridge, slope)
        while (after := held(weights - step)) > now and float(step.abs().max()) > 1e-9:
            step = step / 2
        if now - after < 1e-9:
            break
        weights, now = weights - step, after
    return weights, loss(weights)


class Squares:
    """Least squares from the logits of some paths to the labels: who is worth adding to whom.

    Sums over training samples are taken once for all paths; every choice of paths then is a small
    system of equations.
    """

    def __init__(self, training: Views, held: Views) -> None:
        paths, self.classes = len(held.paths), held.logits.shape[-1]
        x, self.held = (with_one(v.logits) for v in (training, held))
        y, self.y = (one_hot(v.y, self.classes).double() for v in (training, held))
        self.products, self.targets = x.T @ x / len(x), x.T @ y / len(x)
        self.columns = torch.arange(paths * self.classes).view(paths, self.classes)

    def __call__(self, chosen: Sequence[int]) -> float:
        """Mean squared error on the validation split."""
        of_paths = self.columns[list(chosen)].flatten()
        k = torch.cat([of_paths, torch.tensor([self.columns.numel()])])
        system = self.products[k][:, k] + PULL * torch.eye(len(k), dtype=torch.double)
        fitted = torch.linalg.solve(system, self.targets[k])
        return float((self.held[:, k] @ fitted - self.y).square().sum(1).mean())


def with_one(logits: Tensor) -> Tensor:
    """Logits of all paths side by side, and a 1: (samples, paths * classes + 1)."""
    x = beside(list(logits))
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def choose_exits(
    views: Views, tree: Tree, reading: Sequence[Readout], training: Views | None = None
) -> tuple[Exit, ...]:
    """Exits in the order in which a sample meets them; `reading` of every path."""
    y, paths, names = views.y, list(views.paths.values()), list(views.paths)
    said = through(views, reading).logits
    own = [fit_weights(log_p[None], y)[1] for log_p in said]

    def cost(chosen: Sequence[int]) -> int:
        return blocks_run(tree, [paths[i] for i in chosen])[-1]

    def log_loss(chosen: Sequence[int]) -> float:
        return fit_weights(said[list(chosen)], y)[1]

    joint = training is not None and len(paths) * views.logits.shape[-1] <= MOST_INPUTS
    least = LEAST_SQUARES if joint else LEAST_GAIN
    error = Squares(training, views) if training is not None and joint else log_loss
    chosen = [min(range(len(paths)), key=lambda i: (cost([i]), own[i]))]
    now, most = error(chosen), cost([names.index("full")])
    while len(chosen) < min(MOST_EXITS, len(paths)):
        spent, offers = cost(chosen), []
        for i in (i for i in range(len(paths)) if i not in chosen):
            more = cost([*chosen, i]) - spent
            after = error([*chosen, i]) if spent + more <= most else now
            if now - after > least * now:
                offers.append(((now - after) / max(more, 0.5), i, after))
        if not offers:
            break
        _, i, now = max(offers)
        chosen.append(i)
    counts, exits = blocks_run(tree, [paths[i] for i in chosen]), list[Exit]()
    for k, i in enumerate(chosen):
        plain = Exit(names[i], parts_on(tree, paths[i]), counts[k], reading[i], ())
        exits.append(best_answer(exits, plain, views, training if joint else None))
    return tuple(exits)


def best_answer(before: Sequence[Exit], last: Exit, views: Views, training: Views | None) -> Exit:
    """An exit with the answer of least log-loss: alone, a weighted sum, or a joint map."""
    exits, names = [*before, last], list(views.paths)
    chosen = [names.index(e.name) for e in exits]
    logits = list(views.logits[chosen])
    said = torch.stack([read(x, e.readout) for e, x in zip(exits, logits, strict=True)])
    weights, loss = fit_weights(said, views.y)
    alone = (0.0,) * len(before) + (1.0,)
    own = float(nll_loss(said[-1], views.y))
    offers = [(own, replace(last, weights=alone)),
              (loss, replace(last, weights=tuple(weights.tolist())))]  # fmt: skip
    if training is not None and before:
        matrix, bias = fit_map(list(training.logits[chosen]), training.y)
        mapped = Readout(1.0, as_tuples(matrix), tuple(bias.tolist()))
        joint, loss = at_best_temperature(mapped, beside(logits), views.y)
        offers.append((loss, replace(last, weights=alone, joint=joint)))
    return min(offers, key=lambda offer: offer[0])[1]


def parts_on(tree: Tree, path: Sequence[int]) -> tuple[str, ...]:
    """The parts of a path in front of the head."""
    return tuple(f"{l}-{r}" for l, r in tree.path_edges(path)[:-1])


def thresholds_for(confidence: Tensor, blocks: Sequence[int], price: float) -> tuple[float, ...]:
    """From the last exit to the first: the threshold that is worth most at a price of a block."""
    worth = confidence - price * torch.tensor(blocks, dtype=torch.double)[:, None]
    going_on, thresholds = worth[-1], [0.0]
    for k in range(len(blocks) - 2, -1, -1):
        inner = torch.quantile(confidence[k], torch.linspace(0, 1, CUTS + 1, dtype=torch.double))
        cuts = torch.tensor([0.0, *inner.tolist(), 1.0], dtype=torch.double)
        leaves = confidence[k] >= cuts[:, None]
        best = int(torch.where(leaves, worth[k], going_on).mean(1).argmax())
        thresholds.insert(0, float(cuts[best]))
        going_on = torch.where(leaves[best], worth[k], going_on)
    return tuple(thresholds)


def calibrate(
    views: Views,
    tree: Tree,
    step: int,
    reading: Sequence[Readout],
    training: Views | None = None,
) -> Calibration:
    """Exits and policies from what all paths say about a validation split, and about some training
    samples; `reading` of each path."""
    exits = choose_exits(views, tree, reading, training)
    confidence, correct = views.answers(exits)
    blocks = [e.blocks for e in exits]
    policies: dict[float, Policy] = {}
    for price in [*torch.logspace(-0.5, -4, PRICES).tolist(), 0.0]:
        thresholds = thresholds_for(confidence, blocks, price)
        o = outcome(confidence, correct, blocks, thresholds)
        policies[o.blocks] = Policy(thresholds, o.blocks, o.accuracy)
    rising = sorted(policies.values(), key=lambda p: p.blocks)
    return Calibration(step, len(views.y), exits, tuple(rising))
