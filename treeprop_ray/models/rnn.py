"""The cells f_0 … f_{D-1} and the readout in one module; every path is a plain recurrent network.

The time tree is Tree(2**D): an edge (l, r) of length 2**d is served by f_d on x[l:r], whatever l.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from treeprop_ray.config import Settings, dotted
from treeprop_ray.core.cells import CELLS, GRUCell
from treeprop_ray.core.mingru import MinGRUCell
from treeprop_ray.core.network import Shape, count_parameters
from treeprop_ray.core.own_cell import OwnCell
from treeprop_ray.core.rng import seeded
from treeprop_ray.core.scoring import Counts, Score, count
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError, first_line, place_of
from treeprop_ray.models import own

READOUT = "readout"


def cell_name(d: int) -> str:
    """How the cell of a depth is called in checkpoints."""
    return f"f{d}"


def part_names(depth: int) -> list[str]:
    """All parts of a network of this depth."""
    return [*(cell_name(d) for d in range(depth)), READOUT]


def make_part(settings: Settings, shape: Shape, name: str) -> nn.Module:
    """A freshly initialised cell or the readout; depends on (seed, name) only."""
    hidden, size = settings.model.hidden, shape.input_shape[1]
    if name != READOUT and dotted(settings.model.name):
        return own_cell(settings, shape, name)
    with seeded(settings.seed, "init", name):
        module: nn.Module
        if name == READOUT:
            module = nn.Linear(hidden, shape.classes)
        else:
            kinds: dict[str, type[nn.Module]] = {**CELLS, "mingru": MinGRUCell}
            module = kinds[settings.model.name](2 ** int(name[1:]) * size, hidden)
    return module.to(shape.dtype)


def own_cell(settings: Settings, shape: Shape, name: str) -> OwnCell:
    """The cell of a depth from the user's factory; UserError where it is none."""
    inputs = 2 ** int(name[1:]) * shape.input_shape[1]
    module, told = own(settings, inputs, name), f"model.name={settings.model.name}"
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise UserError(f"{told}: must give a torch module for model.recurrent=true, not {kind}")
    cell = OwnCell(module, inputs, settings.model.hidden).to(shape.dtype)
    try:
        with seeded(settings.seed, "check", name):
            cell.check(shape.dtype)
    except UserError as e:
        raise UserError(f"{told}: the cell {e}") from e
    except Exception as e:  # the user's own code may raise anything
        tried = f"a cell for x (batch, {inputs}) and h (batch, {settings.model.hidden})"
        reason = f"{type(e).__name__}: {first_line(e)}{place_of(e)}"
        raise UserError(f"{told}: {tried}: {reason}") from e
    return cell


@dataclass(frozen=True)
class TimeBlueprint:
    """How to make the cells and the readout of a recurrent network."""

    settings: Settings
    shape: Shape
    family: str = "gaussian"
    stem_trains: bool = False

    @property
    def N(self) -> int:
        """Number of symbols."""
        return 2**self.settings.time.depth

    def parts(self, names: Sequence[str], seed: int, dtype: torch.dtype) -> dict[str, nn.Module]:
        """The parts of some names."""
        return {name: make_part(self.settings, self.shape, name) for name in names}

    def count_parameters(self, name: str) -> int:
        """Numbers in a part."""
        return count_parameters(make_part(self.settings, self.shape, name))


class TimePath(nn.Module):
    """A path as a plain network: h_r = f_d(h_l, x[l:r]) along it, then the readout."""

    def __init__(self, cells: Mapping[str, nn.Module], readout: nn.Linear, path: list[int]) -> None:
        super().__init__()
        self.hidden = readout.in_features
        spans = [(l, r, cell_name((r - l).bit_length() - 1)) for l, r in pairwise(path)]
        self.spans = spans
        self.cells = nn.ModuleDict({name: cells[name] for name in sorted({s[2] for s in spans})})
        self.readout = readout

    def forward(self, x_BNS: Tensor) -> Tensor:
        """Sequences to logits."""
        h = x_BNS.new_zeros(x_BNS.shape[0], self.hidden)
        for l, r, name in self.spans:
            h = self.cells[name](x_BNS[:, l:r].flatten(1), h)
        out: Tensor = self.readout(h)
        return out


class TimeNetwork(nn.Module):
    """All cells of a time tree (a BPTT run has trained only f_0) and the readout."""

    def __init__(self, depth: int, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.depth, self.tree = depth, Tree(2**depth)
        self.module = nn.ModuleDict(dict(parts))

    @classmethod
    def of(cls, settings: Settings, shape: Shape, names: Sequence[str]) -> TimeNetwork:
        """A freshly initialised network of some parts."""
        parts = {name: make_part(settings, shape, name) for name in names}
        return cls(settings.time.depth, parts)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take up weights keyed as in checkpoints: `f0/weight_ih`."""
        self.module.load_state_dict({k.replace("/", "."): v for k, v in weights.items()})

    def parts(self) -> dict[str, nn.Module]:
        """Cells and readout by name."""
        return dict(self.module.items())

    def path(self, indices: Sequence[int]) -> TimePath:
        """The network along a path of the time tree; shares weights."""
        self.tree.path_edges(indices)
        readout = self.module[READOUT]
        assert isinstance(readout, nn.Linear)
        return TimePath(self.parts(), readout, list(indices))

    def chain(self) -> TimePath:
        """The deployed network: f_0, step by step."""
        return self.path(self.tree.chain)

    @torch.no_grad()
    def score(
        self, paths: Mapping[str, Sequence[int]], batches: Iterable[tuple[Tensor, Tensor]]
    ) -> dict[str, Score]:
        """Score paths on some batches."""
        counts: dict[str, list[Counts]] = {name: [] for name in paths}
        modules = {name: self.path(path) for name, path in paths.items()}
        device = next(self.parameters()).device
        for x, y in batches:
            for name, module in modules.items():
                counts[name].append(count(module, x.to(device), y))
        return {name: Score.of(of_path) for name, of_path in counts.items()}


class TorchGRU(nn.Module):
    """The deployed GRU as torch.nn.GRU and torch.nn.Linear."""

    def __init__(self, gru: nn.GRU, readout: nn.Linear) -> None:
        super().__init__()
        self.gru, self.readout = gru, readout

    def forward(self, x_BNS: Tensor) -> Tensor:
        """Sequences to logits."""
        out: Tensor = self.readout(self.gru(x_BNS)[1][0])
        return out


def as_torch_gru(cell: GRUCell, readout: nn.Linear) -> TorchGRU:
    """A copy of the deployed network made of torch's own modules (batch first)."""
    gru = nn.GRU(cell.inputs, cell.hidden, batch_first=True, dtype=cell.weight_ih.dtype)
    gru.load_state_dict({f"{k}_l0": v.detach().clone() for k, v in cell.state_dict().items()})
    linear = nn.Linear(readout.in_features, readout.out_features, dtype=cell.weight_ih.dtype)
    linear.load_state_dict(readout.state_dict())
    return TorchGRU(gru, linear).eval()
