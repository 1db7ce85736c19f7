"""A trained path written as plain PyTorch, as a torch.nn.GRU, or as Hugging Face's GPT-2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from treeprop_ray.config import Settings
from treeprop_ray.core.cells import GRUCell
from treeprop_ray.data.text import GPT2Bytes, tokenizer_of
from treeprop_ray.models import hf
from treeprop_ray.models.rnn import TimeNetwork, as_torch_gru


def write_hf(chain: nn.Sequential, settings: Settings, folder: Path) -> None:
    """Hugging Face's GPT-2 files; GPT-2's tokenizer beside them if the run used it."""
    hf.write(chain, settings.model, folder)
    if settings.data.tokenizer == "gpt2":
        tokenizer = tokenizer_of(settings.data)
        assert isinstance(tokenizer, GPT2Bytes)
        tokenizer.bpe.save_pretrained(folder)


def write_torch_gru(network: TimeNetwork, folder: Path) -> None:
    """gru.safetensors and readout.safetensors: weights of a torch.nn.GRU and torch.nn.Linear."""
    parts = network.parts()
    cell, readout = parts["f0"], parts["readout"]
    if isinstance(cell, GRUCell):
        plain = as_torch_gru(cell, readout)  # type: ignore[arg-type]
        save_file(plain.gru.state_dict(), folder / "gru.safetensors")
        save_file(plain.readout.state_dict(), folder / "readout.safetensors")


def write(module: nn.Module, example: Tensor, folder: Path, info: dict[str, Any]) -> None:
    """Write a plain module as program, weights and description. `example`: at least two inputs."""
    module = module.eval().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().contiguous().clone() for k, v in module.state_dict().items()}
    save_file(state, folder / "model.safetensors")
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
