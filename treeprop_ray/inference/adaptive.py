"""Adaptive inference with a trained tree: samples stop where the averaged answer is sure enough.

`evaluate mode=adaptive` calibrates the exits on the validation split (calibration.py), keeps the
result in the run folder as adaptive.json, and scores it on another split; `early_exit` is the
network that really stops (early_exit.py), for programs and servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from treeprop_ray import methods
from treeprop_ray.config import Settings
from treeprop_ray.core.factor import full
from treeprop_ray.core.network import STEM, TreeNetwork
from treeprop_ray.core.states import split_stem
from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.data import DataSet
from treeprop_ray.errors import UserError
from treeprop_ray.inference.calibration import calibrate, paths_of
from treeprop_ray.inference.early_exit import FILE, Calibration, EarlyExit
from treeprop_ray.inference.outcome import Outcome, Views, blocks_run, look, outcome
from treeprop_ray.inference.paths import Network, network_through
from treeprop_ray.inference.readout import readouts, through, training_batches
from treeprop_ray.run.reading import open_run


class Row(NamedTuple):
    """A line of the table: what was asked for (blocks or a threshold), and what came of it."""

    asked: float
    outcome: Outcome
    fixed: float  # accuracy of single paths at as many blocks
    read: float  # the same, where single paths are read as the exits are


class Table(NamedTuple):
    """Adaptive inference on a split."""

    key: str  # blocks or threshold
    rows: list[Row]
    exits: tuple[str, ...]
    paths: dict[str, tuple[int, float]]  # (blocks, accuracy) of every path on its own
    read: dict[str, tuple[int, float]]  # the same, read as the exits are
    calibration: Calibration


def numbers_of(key: str, given: Any, low: float, high: float, example: str) -> list[float]:
    """A number or a list of numbers from `low` to `high`, sorted."""
    values = given if isinstance(given, list) else [given]
    between = f"[{low:g}, {high:g}]"
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            raise UserError(f"{key}={given}: a number in {between}, or a list such as {example}")
    if not values:
        raise UserError(f"{key}=[]: at least one number in {between}")
    return sorted({float(value) for value in values})


def thresholds_of(given: Any) -> list[float]:
    """A threshold or a list of them."""
    return numbers_of("threshold", given, 0, 1, "[0.5,0.9,1]")


def budgets_of(given: Any) -> list[float]:
    """Mean blocks of a sample, or a list of them."""
    return numbers_of("blocks", given, 0, 10**6, "[1,2,3]")


def with_exits(network: Network, settings: Settings) -> TreeNetwork:
    """The network of a run whose samples may stop early; UserError where they cannot."""
    method = methods.of(settings)
    if not method.short_paths or not isinstance(network, TreeNetwork):
        kind = f"method={method.name} model.name={settings.model.name}"
        raise UserError(f"adaptive: a run with {kind} has no short paths")
    if settings.loss.name != "cross_entropy":
        raise UserError(
            f"adaptive: a sample stops where the softmax is confident, and a run with "
            f"loss.name={settings.loss.name} has none; use path=all"
        )
    if settings.model.name == "gpt":
        raise UserError(
            "adaptive: a token that stops early leaves no state for later tokens to "
            "attend to; use path=all, or generate with draft="
        )
    return network


def default_budgets(calibration: Calibration) -> list[float]:
    """From the first exit to what the dearest policy uses, in steps of half a block at first, then
    of one."""
    first, most = calibration.exits[0].blocks, calibration.policies[-1].blocks
    steps = [first + 0.5 * k for k in range(7)]
    steps += range(first + 4, calibration.exits[-1].blocks + 1)
    return [b for b, before in zip(steps, [0.0, *steps], strict=False) if before < most]


def evaluate(
    network: Network,
    settings: Settings,
    samples: DataSet,
    split: str,
    step: int,
    blocks: Any = None,
    threshold: Any = None,
) -> Table:
    """Calibrate on the validation split and score on another one."""
    trained = with_exits(network, settings)
    tree, paths, ignored = trained.tree, paths_of(trained.tree), settings.loss.ignore_index
    held = look(trained, paths, samples.batches("validation"), ignored)
    seen = list(training_batches(samples))
    training = look(trained, paths, seen, ignored) if seen else None
    reading = readouts(held, training)
    calibration = calibrate(held, tree, step, reading, training)
    views = look(trained, paths, samples.batches(split), ignored)
    fixed, read = fixed_paths(views, tree), fixed_paths(through(views, reading), tree)
    confidence, correct = views.answers(calibration.exits)
    costs = [e.blocks for e in calibration.exits]
    wanted: dict[float, Sequence[float]]
    if threshold is not None:
        wanted = {t: [t] * len(costs) for t in thresholds_of(threshold)}
    else:
        budgets = default_budgets(calibration) if blocks is None else budgets_of(blocks)
        wanted = {b: calibration.policy(b).thresholds for b in budgets}
    rows = []
    for asked, thresholds in wanted.items():
        found = outcome(confidence, correct, costs, thresholds)
        equal = (at_equal_blocks(single, found.blocks) for single in (fixed, read))
        rows.append(Row(asked, found, *equal))
    key = "blocks" if threshold is None else "threshold"
    return Table(key, rows, tuple(e.name for e in calibration.exits), fixed, read, calibration)


def fixed_paths(views: Views, tree: Tree) -> dict[str, tuple[int, float]]:
    """(blocks, accuracy) of every path on its own, to compare with."""
    accuracy = (views.logits.argmax(-1) == views.y).double().mean(1).tolist()
    return {
        name: (blocks_run(tree, [path])[-1], accuracy[i])
        for i, (name, path) in enumerate(views.paths.items())
    }


def at_equal_blocks(fixed: Mapping[str, tuple[int, float]], blocks: float) -> float:
    """What single paths reach at so many blocks: the best path of at most so many, or, if that is
    more, a shorter and a longer one to which samples are given at random, in the right shares."""
    points = sorted(fixed.values())
    best = max([right for cost, right in points if cost <= blocks], default=points[0][1])
    for a, low in (p for p in points if p[0] <= blocks):
        for b, high in (p for p in points if p[0] > blocks):
            best = max(best, low + (high - low) * (blocks - a) / (b - a))
    return best


def table_of(table: Table) -> str:
    """Accuracy, mean blocks and the share of samples that leave at each exit, as plain text."""
    exits = "  ".join(f"{'at ' + name:>11}" for name in table.exits)
    head = f"{table.key:>9}  {'accuracy':>9}  {'blocks':>6}  {'one path':>9}  {'read so':>9}"
    lines = [f"{head}  {exits}"]
    for row in table.rows:
        o = row.outcome
        shares = "  ".join(f"{100 * share:>9.1f} %" for share in o.left_at)
        lines.append(
            f"{row.asked:>9g}  {100 * o.accuracy:>7.2f} %  {o.blocks:>6.2f}  "
            f"{100 * row.fixed:>7.2f} %  {100 * row.read:>7.2f} %  {shares}"
        )
    lines.append("one path: single paths at as many blocks; read so: with the exits' own readings")
    return "\n".join(lines)


# -- the network that stops -----------------------------------------------------------------------


def parts_of(network: TreeNetwork) -> dict[str, Callable[[Tensor], Tensor]]:
    """Stem, head and blocks of a network by name, as functions of one tensor."""
    through = network_through(network)

    def stem(x: Tensor) -> Tensor:
        z_0, context = split_stem(through(STEM, x))
        if context is not None:
            raise UserError("early exits: blocks with side inputs cannot run on a part of a batch")
        return z_0

    def block(edge: Edge) -> Callable[[Tensor], Tensor]:
        return lambda z: through(edge, z)

    tree = network.tree
    blocks = {f"{l}-{r}": block((l, r)) for l, r in tree.blocks if (l, r) != tree.head}
    return {"stem": stem, "head": lambda z: full(through(tree.head, z)), **blocks}


def early_exit(
    run: str, checkpoint: str = "last", data_root: str | None = None, storage: str = ""
) -> EarlyExit:
    """The network of a run that `evaluate mode=adaptive` has calibrated."""
    settings, _, point, network = open_run(run, checkpoint, data_root, storage)
    return EarlyExit(parts_of(with_exits(network, settings)), stored(run, point.meta["step"]))


def stored(run: str, step: int) -> Calibration:
    """The calibration that lies in a run folder; it must be of the checkpoint that is used."""
    again = f"python -m treeprop_ray.evaluate run={run} mode=adaptive makes it"
    if not (Path(run) / FILE).is_file():
        raise UserError(f"run={run}: has no {FILE}; {again}")
    try:
        calibration = Calibration.read(run)
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"run={run}: {FILE} cannot be read; {again} anew") from e
    if calibration.step != step:
        raise UserError(f"run={run}: {FILE} is of step {calibration.step}, not {step}; {again}")
    return calibration
