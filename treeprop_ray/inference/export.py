"""A trained path written as plain PyTorch, as a torch.nn.GRU, or as Hugging Face's GPT-2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.config import Settings
from treeprop_ray.core import tensor_file
from treeprop_ray.core.cells import GRUCell
from treeprop_ray.core.network import Shape, TreeNetwork, edge_name
from treeprop_ray.core.own_cell import OwnCell
from treeprop_ray.data.text import tokenizer_of
from treeprop_ray.errors import UserError
from treeprop_ray.inference import early_exit
from treeprop_ray.inference.early_exit import Calibration
from treeprop_ray.models import hf, own
from treeprop_ray.models.pretrained import TreeNetwork as Pretrained
from treeprop_ray.models.rnn import TimeNetwork, as_torch_gru


def write_hf(chain: nn.Sequential, settings: Settings, folder: Path) -> None:
    """Hugging Face's GPT-2 files with the run's tokenizer: `AutoTokenizer.from_pretrained`."""
    hf.write(chain, settings.model, folder)
    tokenizer_of(settings.data).as_hf().save_pretrained(folder)


def write_pretrained(
    trained: TreeNetwork, settings: Settings, shape: Shape, path: Sequence[int], folder: Path
) -> None:
    """A path as the Hugging Face model that the run's own network came from."""
    given = own(settings, shape)
    if not isinstance(given, Pretrained):
        raise UserError(f"format=hf: model.name={settings.model.name} is not of from_pretrained")
    given.load_state_dict(trained.state_dict())
    given.save_pretrained(folder, path)


def write_cell(network: TimeNetwork, folder: Path) -> None:
    """gru.safetensors, or cell.safetensors for one's own module, and readout.safetensors: weights
    of a torch.nn.GRU or that module, and of a torch.nn.Linear."""
    parts = network.parts()
    cell, readout = parts["f0"], parts["readout"]
    if isinstance(cell, GRUCell):
        plain = as_torch_gru(cell, readout)  # type: ignore[arg-type]
        tensor_file.save(plain.gru.state_dict(), folder / "gru.safetensors")
        tensor_file.save(plain.readout.state_dict(), folder / "readout.safetensors")
    elif isinstance(cell, OwnCell):
        tensor_file.save(cell.step.state_dict(), folder / "cell.safetensors")
        tensor_file.save(readout.state_dict(), folder / "readout.safetensors")


def write_adaptive(
    network: TreeNetwork, calibration: Calibration, x: Tensor, folder: Path, info: dict[str, Any]
) -> None:
    """The parts of all exits as programs, what was calibrated, and the file that runs them.

    `x`: at least two inputs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network = network.eval().cpu()
    parts = {edge_name(edge): module for edge, module in network.parts().items()}
    batch = torch.export.Dim("batch")

    def program(name: str, module: nn.Module, example: Tensor) -> Tensor:
        exported = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        torch.export.save(exported, folder / f"{name}.pt2")
        with torch.no_grad():
            out: Tensor = module(example)
        return out

    z_0 = program("stem", network.stem, x)
    states: dict[tuple[str, ...], Tensor] = {(): z_0}
    for e in calibration.exits:
        for k in range(1, len(e.parts) + 1):
            key = e.parts[:k]
            if key not in states:
                states[key] = program(key[-1], parts[key[-1]], states[key[:-1]])
    program("head", network.block(network.tree.head), states[calibration.exits[0].parts])
    calibration.write(folder)
    shutil.copy(early_exit.__file__, folder / "early_exit.py")
    told = {**info, "input_shape": list(x.shape[1:]), "exits": [e.name for e in calibration.exits]}
    (folder / "model.json").write_text(json.dumps(told, indent=2) + "\n")


def write(module: nn.Module, example: Tensor, folder: Path, info: dict[str, Any]) -> None:
    """Write a plain module as program, weights and description. `example`: at least two inputs."""
    module = module.eval().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().contiguous().clone() for k, v in module.state_dict().items()}
    tensor_file.save(state, folder / "model.safetensors")
    torch.save(state, folder / "model.pt")
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "model.pt2")
    description = {
        **info,
        "input_shape": list(example.shape[1:]),
        "input_dtype": str(example.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in module.parameters()),
        "layers": {name: str(child).split("\n") for name, child in module.named_children()},
        "tensors": {k: list(v.shape) for k, v in state.items()},
    }
    (folder / "model.json").write_text(json.dumps(description, indent=2) + "\n")
