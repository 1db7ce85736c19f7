"""A trained path written as plain PyTorch, as a torch.nn.GRU, or as Hugging Face's GPT-2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from treeprop_ray import methods
from treeprop_ray.config import Settings, dotted
from treeprop_ray.core import tensor_file
from treeprop_ray.core.cells import GRUCell
from treeprop_ray.core.network import Shape, TreeNetwork, edge_name
from treeprop_ray.core.own_cell import OwnCell
from treeprop_ray.data.text import tokenizer_of
from treeprop_ray.errors import UserError
from treeprop_ray.inference import early_exit
from treeprop_ray.inference.adaptive import stored, with_exits
from treeprop_ray.inference.early_exit import Calibration
from treeprop_ray.inference.paths import as_path_text, parse_path
from treeprop_ray.inference.settings import ExportSettings
from treeprop_ray.models import hf, own
from treeprop_ray.models.pretrained import TreeNetwork as Pretrained
from treeprop_ray.models.rnn import TimeNetwork, as_torch_gru
from treeprop_ray.run.folder import run_settings
from treeprop_ray.run.reading import open_run


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
    network: TreeNetwork, calibration: Calibration, x: Any, folder: Path, info: dict[str, Any]
) -> None:
    """The parts of all exits as programs, what was calibrated, and the file that runs them.

    `x`: at least two inputs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network = network.eval().cpu()
    parts = {edge_name(edge): module for edge, module in network.parts().items()}
    batch = torch.export.Dim("batch")

    def program(name: str, module: nn.Module, example: Any) -> Tensor:
        sizes = (pytree.tree_map(lambda _: {0: batch}, example),)
        exported = torch.export.export(module, (example,), dynamic_shapes=sizes)
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
    shape = described(x, shape_of)
    told = {**info, "input_shape": shape, "exits": [e.name for e in calibration.exits]}
    (folder / "model.json").write_text(json.dumps(told, indent=2) + "\n")


def described(example: Any, of: Callable[[Tensor], Any]) -> Any:
    """Something of an input; of several, by name or in order."""
    if isinstance(example, dict):
        return {name: of(tensor) for name, tensor in example.items()}
    return [of(tensor) for tensor in example] if isinstance(example, tuple) else of(example)


def shape_of(tensor: Tensor) -> list[int]:
    """The shape of a sample."""
    return list(tensor.shape[1:])


def dtype_of(tensor: Tensor) -> str:
    """The name of its type."""
    return str(tensor.dtype).removeprefix("torch.")


def write(module: nn.Module, example: Any, folder: Path, info: dict[str, Any]) -> None:
    """Write a plain module as program, weights and description. `example`: at least two inputs."""
    module = module.eval().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().contiguous().clone() for k, v in module.state_dict().items()}
    tensor_file.save(state, folder / "model.safetensors")
    torch.save(state, folder / "model.pt")
    batch = torch.export.Dim("batch")
    sizes = (pytree.tree_map(lambda _: {0: batch}, example),)
    program = torch.export.export(module, (example,), dynamic_shapes=sizes)
    torch.export.save(program, folder / "model.pt2")
    description = {
        **info,
        "input_shape": described(example, shape_of),
        "input_dtype": described(example, dtype_of),
        "parameters": sum(p.numel() for p in module.parameters()),
        "layers": {name: str(child).split("\n") for name, child in module.named_children()},
        "tensors": {k: list(v.shape) for k, v in state.items()},
    }
    (folder / "model.json").write_text(json.dumps(description, indent=2) + "\n")


def export(settings: ExportSettings) -> Path:
    """Write what the export command asks for; returns the folder."""
    is_hf = settings.format == "hf"
    model = run_settings(settings.run).model
    name_of = model.name
    if is_hf and name_of != "gpt" and (model.recurrent or not dotted(name_of)):
        raise UserError(f"format=hf: the run has model.name={name_of}; needs gpt")
    opened = open_run(settings.run, settings.checkpoint, settings.data_root, settings.storage)
    of_run, samples, point, network = opened
    text = as_path_text(settings.path)
    method = methods.of(of_run)
    outline = method.outline(of_run, network.tree)
    adapts = text == "adaptive"
    if adapts and is_hf:
        raise UserError("path=adaptive: has no form in Hugging Face; use format=plain")
    trained = with_exits(network, of_run) if adapts else None
    path = network.tree.chain if adapts else parse_path(text, outline, method)
    known = {"adaptive": path, **network.tree.named_paths, **outline.paths}
    name = (text if text in known else "-".join(map(str, path))) + ("-hf" if is_hf else "")
    folder = Path(settings.to) if settings.to else Path(settings.run) / "export" / name
    if folder.exists() and not folder.is_dir():
        raise UserError(f"to={settings.to}: is a file, must be a folder")
    if is_hf:
        assert isinstance(network, TreeNetwork)
        if dotted(name_of):
            write_pretrained(network, of_run, samples.shape, path, folder)
        else:
            write_hf(network.path(path), of_run, folder)
        return folder
    about = {
        "experiment": of_run.experiment, "run": point.meta, "path": path, "data": samples.name,
    }  # fmt: skip
    held = len(samples.test) > 1
    x = samples.read("test", slice(0, 2)).x if held else torch.cat([samples.example.x] * 2)
    inputs, example = samples.shape.form, samples.inputs(x)
    given = inputs.unpack(example) if inputs else example
    if trained is not None:
        calibration = stored(settings.run, point.meta["step"])
        write_adaptive(trained, calibration, given, folder, {**about, "path": text})
        return folder
    write(network.path(path), given, folder, about)
    if isinstance(network, TimeNetwork) and path == network.tree.chain:
        write_cell(network, folder)
    return folder
