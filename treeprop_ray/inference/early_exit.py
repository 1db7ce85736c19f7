"""A network that answers as early as it can: its exits, and how they are run.

Needs torch alone: `export path=adaptive` puts this file beside the programs of the parts, and

    from early_exit import EarlyExit
    network = EarlyExit.load("folder")
    answer = network(images, blocks=2)      # about two blocks for each image
    answer.labels, answer.confidence, answer.blocks

An exit is a path through the tree; a beginning that an earlier exit has run is not run again. The
answer at an exit is an affine map of the logits of all exits so far, or a weighted sum of their
log-probabilities, each read in its own way: the earlier answers cost nothing any more, and together
they know more than the last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A softmax is below 1 whatever it is rounded to, so threshold 1 always goes to the last exit.
BELOW_ONE = math.nextafter(1.0, 0.0)
FILE = "adaptive.json"


@dataclass(frozen=True)
class Readout:
    """How the logits of a path are read: (matrix @ centred logits + bias) / temperature."""

    temperature: float
    matrix: tuple[tuple[float, ...], ...] = ()  # empty: the logits as they are
    bias: tuple[float, ...] = ()

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Readout:
        """From adaptive.json."""
        matrix = tuple(map(tuple, stored["matrix"]))
        return cls(stored["temperature"], matrix, tuple(stored["bias"]))

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Matrix and bias."""
        if not self.matrix:
            return None
        as_tensor = partial(torch.tensor, dtype=torch.double)
        return as_tensor(self.matrix), as_tensor(self.bias)


@dataclass(frozen=True)
class Exit:
    """A path whose head is asked: its parts in front of the head, and how its logits are read."""

    name: str
    parts: tuple[str, ...]  # such as 0-4, 4-6
    blocks: int  # run in total when a sample leaves here
    readout: Readout  # of this path's own logits
    weights: tuple[float, ...]  # of the log-probabilities of all exits up to here
    joint: Readout = Readout(1.0)  # of all their logits side by side; where it has a matrix, for it


@dataclass(frozen=True)
class Policy:
    """A threshold on the confidence for every exit, and what that gave on the validation split."""

    thresholds: tuple[float, ...]
    blocks: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """What a validation split says about the exits of a trained network."""

    step: int  # of the checkpoint
    samples: int  # of the validation split
    exits: tuple[Exit, ...]
    policies: tuple[Policy, ...]  # by rising number of blocks

    def policy(self, blocks: float | None = None) -> Policy:
        """The one that uses at most so many blocks for a sample and most of them (None: all)."""
        within = [p for p in self.policies if blocks is None or p.blocks <= blocks]
        return (within or self.policies[:1])[-1]

    def write(self, folder: str | Path) -> None:
        """<folder>/adaptive.json."""
        (Path(folder) / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: str | Path) -> Calibration:
        """What `write` wrote."""
        stored: dict[str, Any] = json.loads((Path(folder) / FILE).read_text())
        return cls(
            stored["step"],
            stored["samples"],
            tuple(
                Exit(
                    e["name"],
                    tuple(e["parts"]),
                    e["blocks"],
                    Readout.read(e["readout"]),
                    tuple(e["weights"]),
                    Readout.read(e["joint"]),
                )
                for e in stored["exits"]
            ),
            tuple(
                Policy(tuple(p["thresholds"]), p["blocks"], p["accuracy"])
                for p in stored["policies"]
            ),
        )


@dataclass(frozen=True)
class Answer:
    """For every sample: label, confidence in it, and the blocks that were run."""

    labels: Tensor
    confidence: Tensor
    blocks: Tensor


def centred(logits: Tensor) -> Tensor:
    """Logits (…, C) without what the softmax does not see."""
    x = logits.double()
    return x - x.mean(-1, keepdim=True)


def read(logits: Tensor, readout: Readout) -> Tensor:
    """Log-probabilities of logits (…, C)."""
    x = centred(logits)
    if readout.tensors is not None:
        matrix, bias = (t.to(x.device) for t in readout.tensors)
        x = x @ matrix.T + bias
    return (x / readout.temperature).log_softmax(-1)


def answer_at(exits: Sequence[Exit], logits: Sequence[Tensor]) -> Tensor:
    """Log-probabilities at the last of some exits, from the logits (samples, classes) of all."""
    last = exits[-1]
    if last.joint.matrix:
        return read(beside(logits), last.joint)
    said = (w * read(x, e.readout) for e, w, x in zip(exits, last.weights, logits, strict=True))
    total = sum(said)
    assert isinstance(total, Tensor)
    return total.log_softmax(-1)


def beside(logits: Sequence[Tensor]) -> Tensor:
    """Logits of some paths side by side."""
    return torch.cat([centred(x) for x in logits], -1)


def confidence_of(said: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence and label of log-probabilities (samples, classes)."""
    p, label = said.exp().max(-1)
    return p.clamp(max=BELOW_ONE), label


class EarlyExit:
    """Runs the exits one after the other; a sample that is sure enough leaves."""

    def __init__(self, parts: Mapping[str, Callable[[Tensor], Tensor]], found: Calibration) -> None:
        """`parts`: stem, head and the blocks by their names."""
        self.parts, self.calibration = parts, found

    @classmethod
    def load(cls, folder: str | Path) -> EarlyExit:
        """From an exported folder."""
        programs = {p.stem: torch.export.load(p).module() for p in Path(folder).glob("*.pt2")}
        return cls(programs, Calibration.read(folder))

    def __call__(self, x: Any, blocks: float | None = None) -> Answer:
        """The answers for a batch, at about so many blocks for each sample (None: the best)."""
        return self.at(x, self.calibration.policy(blocks).thresholds)

    @torch.no_grad()
    def at(self, x: Any, thresholds: Sequence[float]) -> Answer:
        """The answers at a threshold for every exit."""
        states: dict[tuple[str, ...], Tensor] = {(): self.parts["stem"](x)}
        device, total = states[()].device, len(states[()])
        here = torch.arange(total, device=device)  # the samples that have not left
        exits, said = self.calibration.exits, list[Tensor]()
        answer = Answer(
            torch.zeros(total, dtype=torch.long, device=device),
            torch.zeros(total, dtype=torch.double, device=device),
            torch.zeros(total, dtype=torch.long, device=device),
        )
        for count, (exit_, threshold) in enumerate(zip(exits, thresholds, strict=True), 1):
            for k in range(1, len(exit_.parts) + 1):
                key = exit_.parts[:k]
                if key not in states:
                    states[key] = self.parts[key[-1]](states[key[:-1]])
            said.append(self.parts["head"](states[exit_.parts]))
            confidence, label = confidence_of(answer_at(exits[:count], said))
            leaves = confidence >= threshold
            if count == len(thresholds):
                leaves = torch.ones_like(leaves)
            gone = here[leaves]
            answer.labels[gone], answer.confidence[gone] = label[leaves], confidence[leaves]
            answer.blocks[gone] = exit_.blocks
            stays = ~leaves
            if not bool(stays.any()):
                break
            here, said = here[stays], [logits[stays] for logits in said]
            states = {key: z[stays] for key, z in states.items()}
        return answer
