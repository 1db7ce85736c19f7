"""Population-based training: weak members take over weights and settings of strong ones.

All trials train side by side for a fifth of their epochs; then each of the worst quarter becomes a
copy of one of the best quarter, with its checkpoint, and goes on with settings a little different
from that one's. What was decided is written down before it is done, and a move that is done twice
changes nothing, so any interruption leaves nothing to mend.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treeprop_ray.config import CHANGEABLE
from treeprop_ray.errors import UserError
from treeprop_ray.run.files import write_whole
from treeprop_ray.sweep.plan import SCORES, Sweep, Trial, read_json
from treeprop_ray.sweep.space import Axis, Point, short

ROUNDS, QUARTER, FACTORS = 5, 0.25, (0.8, 1.2)


@dataclass
class Population:
    """Where the members stand; kept in the sweep's folder."""

    path: Path
    values: dict[str, Point]  # member -> its settings now
    moves: list[dict[str, Any]] = field(default_factory=list)  # epoch, member, source, values
    moved: int = 0  # the last epoch whose moves are done

    @classmethod
    def of(cls, sweep: Sweep) -> Population:
        """The population of a sweep, new or as it was left."""
        members = {trial.settings.name: trial for trial in sweep.trials()}
        protocol = next(iter(members.values())).protocol
        path = sweep.folder / f"population-{protocol}.json"
        stored = read_json(path) or {}
        values: dict[str, Point] = {name: trial.point for name, trial in members.items()}
        values.update({k: v for k, v in stored.get("values", {}).items() if k in members})
        return cls(path, values, stored.get("moves", []), stored.get("moved", 0))

    def keep(self) -> None:
        """Write it down."""
        state = {"values": self.values, "moves": self.moves, "moved": self.moved}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(state, indent=2) + "\n")

    def story(self, name: str) -> str:
        """What a member took over and when, in a few words."""
        texts = []
        for move in self.moves:
            if move["member"] == name:
                values = " ".join(f"{k}={short(v)}" for k, v in move["values"].items())
                texts.append(f"epoch {move['epoch']}: weights of {move['source']}, {values}")
        return "; ".join(texts)

    def decided(self, epoch: int) -> bool:
        """Whether the moves after an epoch are written down."""
        return any(move["epoch"] == epoch for move in self.moves)

    def decide(self, sweep: Sweep, scores: Mapping[str, float], epoch: int) -> None:
        """Write down the moves after an epoch; the same scores always give the same moves."""
        gen = random.Random(f"{sweep.name} {epoch}")
        best = sorted(scores, key=lambda name: scores[name], reverse=sweep.space.mode == "max")
        count = math.ceil(QUARTER * len(best)) if len(best) > 1 else 0
        for weak in best[len(best) - count :]:
            source = gen.choice(best[:count])
            values = explored(self.values[source], sweep.space.grids[0], gen)
            move = {"epoch": epoch, "member": weak, "source": source, "values": values}
            self.moves.append(move)
        self.keep()

    def move(self, sweep: Sweep, epoch: int) -> None:
        """Do what was decided: a member becomes a copy of its source, with settings of its own."""
        for move in self.moves:
            if move["epoch"] == epoch:
                member, source = (sweep.folder / move[key] for key in ("member", "source"))
                shutil.rmtree(member, ignore_errors=True)
                shutil.copytree(source, member)
                self.values[move["member"]] = move["values"]
        self.moved = epoch
        self.keep()


def explored(point: Point, axes: Mapping[str, Axis], gen: random.Random) -> dict[str, Any]:
    """Settings near others: a neighbour in a list, or up to a fifth more or less in a range."""
    near: dict[str, Any] = {}
    for key, axis in axes.items():
        if isinstance(axis, list):
            place = axis.index(point[key]) + gen.choice((-1, 1))
            near[key] = axis[min(max(place, 0), len(axis) - 1)]
        else:
            kind, (low, high) = next(iter(axis.items()))
            value = min(max(point[key] * gen.choice(FACTORS), low), high)
            near[key] = round(value) if kind == "randint" else float(f"{value:.4g}")
    return near


def check(sweep: Sweep) -> None:
    """UserError for a sweep that a population cannot train."""
    if fixed := [key for key in sweep.space.axes if key not in CHANGEABLE]:
        raise UserError(
            f"scheduler=pbt: {fixed[0]} cannot change during a run; axes may be "
            f"{', '.join(sorted(CHANGEABLE))}"
        )
    if len(sweep.seeds) > 1 or len(sweep.space.grids) > 1:
        raise UserError("scheduler=pbt: one grid and one seed; give seeds=[1]")
    if (engine := sweep.words.get("engine", sweep.layer.get("engine", "local"))) != "local":
        raise UserError(f"engine={engine}: scheduler=pbt needs engine=local")


def rounds(epochs: int) -> list[int]:
    """The epochs at which members are compared; the last one ends the run."""
    every = max(1, epochs // ROUNDS)
    return [*range(every, epochs, every), epochs]


def reached(trial: Trial) -> dict[int, float]:
    """The scores that a member's weights have had, by epoch."""
    stored = read_json(trial.folder / SCORES) or {}
    return {int(epoch): float(score) for epoch, score in stored.items()}


def note(folder: Path, epoch: int, score: float) -> None:
    """Write a member's score down."""
    stored = read_json(folder / SCORES) or {}
    write_whole(folder / SCORES, json.dumps({**stored, str(epoch): score}) + "\n")


def configs(members: Sequence[Trial], population: Population, until: int) -> list[dict[str, Any]]:
    """What Tune is given: the member, and how far it goes with which settings."""
    return [
        {
            **trial.point,
            "seed": trial.seed,
            "until": until,
            "values": dict(population.values[trial.settings.name]),
        }
        for trial in members
    ]
