"""Which exits, readings, weights and thresholds a network should use, by its validation split.

1. Every path of the tree (of large trees: those with names) gets a reading of its logits
   (readout.py): a map fitted to training samples where validation wants it, and a temperature.
2. Exits are added one by one: the path that improves the answer most for each block that it costs
   beyond what has been run, as long as one does. The answer is a weighted sum of log-probabilities
   whose weights are fitted (a convex problem, held near "the last exit alone").
3. For a price of a block, thresholds are set from the last exit to the first: samples above one
   leave if on the whole that is worth more than going on. Many prices give many policies. What an
   answer is worth is its confidence, which is calibrated: right or wrong would be the same on
   average, and a noisier guide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treeprop_ray.core.tree import Tree
from treeprop_ray.inference.early_exit import Calibration, Exit, Policy, Readout
from treeprop_ray.inference.outcome import Views, blocks_run, outcome
from treeprop_ray.inference.readout import through

MOST_PATHS = 32  # beyond that only paths with names are looked at
MOST_EXITS = 8
LEAST_GAIN = 0.003  # share of the log-loss, for an exit to be added
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


def choose_exits(views: Views, tree: Tree, reading: Sequence[Readout]) -> tuple[Exit, ...]:
    """Exits in the order in which a sample meets them; `reading` of every path."""
    y, paths, names = views.y, list(views.paths.values()), list(views.paths)
    said = through(views, reading).logits
    own = [fit_weights(log_p[None], y)[1] for log_p in said]

    def cost(chosen: Sequence[int]) -> int:
        return blocks_run(tree, [paths[i] for i in chosen])[-1]

    chosen = [min(range(len(paths)), key=lambda i: (cost([i]), own[i]))]
    weights, loss = fit_weights(said[chosen], y)
    fitted = [weights]
    while len(chosen) < min(MOST_EXITS, len(paths)):
        spent, offers = cost(chosen), []
        for i in (i for i in range(len(paths)) if i not in chosen):
            weights, after = fit_weights(said[[*chosen, i]], y)
            if loss - after > LEAST_GAIN * loss:
                each = (loss - after) / max(cost([*chosen, i]) - spent, 0.5)
                offers.append((each, i, weights, after))
        if not offers:
            break
        _, i, weights, loss = max(offers, key=lambda offer: offer[0])
        chosen.append(i)
        fitted.append(weights)
    counts = blocks_run(tree, [paths[i] for i in chosen])
    return tuple(
        Exit(names[i], parts_on(tree, paths[i]), blocks, reading[i], tuple(weights.tolist()))
        for i, blocks, weights in zip(chosen, counts, fitted, strict=True)
    )


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


def calibrate(views: Views, tree: Tree, step: int, reading: Sequence[Readout]) -> Calibration:
    """Exits and policies from what all paths say about a validation split; `reading` of each."""
    exits = choose_exits(views, tree, reading)
    confidence, correct = views.answers(exits)
    blocks = [e.blocks for e in exits]
    policies: dict[float, Policy] = {}
    for price in [*torch.logspace(-0.5, -4, PRICES).tolist(), 0.0]:
        thresholds = thresholds_for(confidence, blocks, price)
        o = outcome(confidence, correct, blocks, thresholds)
        policies[o.blocks] = Policy(thresholds, o.blocks, o.accuracy)
    rising = sorted(policies.values(), key=lambda p: p.blocks)
    return Calibration(step, len(views.y), exits, tuple(rising))
