"""Write a trained path as a plain PyTorch network that needs nothing of this package.

    python -m treeprop_ray.export run=results/runs/<name>                  # the full chain
    python -m treeprop_ray.export run=results/runs/<name> path=spine-2 to=short

Writes into the folder `to`: model.pt2 (the program: `torch.export.load("model.pt2").module()`),
model.safetensors and model.pt (the weights, `torch.load(..., weights_only=True)`), and model.json
(path, layers, input shape, parameters). The deployed chain of a GRU also as gru.safetensors and
readout.safetensors: `torch.nn.GRU(S, H, batch_first=True)` and `torch.nn.Linear(H, classes)`.

A language model with format=hf is written as Hugging Face's GPT-2 instead, a short path as one with
fewer layers: `transformers.GPT2LMHeadModel.from_pretrained(folder)`. The default folder is then
<run>/export/<path>-hf.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeprop_ray import cli, config
from treeprop_ray.config import Settings, opt
from treeprop_ray.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from treeprop_ray.models.rnn import TimeNetwork


@dataclass
class ExportSettings:
    """Settings of the export command."""

    run: str = opt("", "run folder, e.g. results/runs/<name>")
    checkpoint: str = opt("last", "last, best or a step number")
    path: Any = opt("full", "full, spine-k, or indices such as [0,4,6,7,8]")
    format: str = opt(
        "plain", "a PyTorch program, or Hugging Face's GPT-2", choices=["plain", "hf"]
    )
    to: str = opt("", "target folder; default: <run>/export/<path>")
    data_root: str | None = opt(None, "hub folder, if it has moved since the run")


def load(words: Sequence[str]) -> ExportSettings:
    """Settings from command-line words."""
    settings: ExportSettings = config.merge(ExportSettings, ("", config.parse_overrides(words)))
    return settings


def run(settings: ExportSettings) -> None:
    """The export command."""
    from treeprop_ray.core.network import TreeNetwork
    from treeprop_ray.models.rnn import TimeNetwork
    from treeprop_ray.run.reading import as_path_text, open_run, parse_path, run_settings
    from treeprop_ray.train import outline_of

    if settings.format == "hf" and (of := run_settings(settings.run)).model.name != "gpt":
        raise UserError(f"format=hf: the run has model.name={of.model.name}; needs gpt")
    opened = open_run(settings.run, settings.checkpoint, settings.data_root)
    of_run, samples, found, network = opened
    text = as_path_text(settings.path)
    outline = outline_of(of_run, network.tree)
    path = parse_path(text, outline, of_run.method)
    known = {**network.tree.named_paths, **outline.paths}
    name = text if text in known else "-".join(map(str, path))
    name += "-hf" if settings.format == "hf" else ""
    folder = Path(settings.to) if settings.to else Path(settings.run) / "export" / name
    if folder.exists() and not folder.is_dir():
        raise UserError(f"to={settings.to}: is a file, must be a folder")
    if settings.format == "hf":
        assert isinstance(network, TreeNetwork)
        write_hf(network.path(path), of_run, folder)
        return
    example = samples.inputs(samples.test.x[:2])
    info = {"experiment": of_run.experiment, "run": found.meta, "path": path, "data": samples.name}
    write(network.path(path), example, folder, info)
    if isinstance(network, TimeNetwork) and path == network.tree.chain:
        write_torch_gru(network, folder)
    print(f"wrote {', '.join(sorted(p.name for p in folder.iterdir()))} to {folder}")


def write_hf(chain: nn.Sequential, settings: Settings, folder: Path) -> None:
    """Hugging Face's GPT-2 files; GPT-2's tokenizer beside them if the run used it."""
    from treeprop_ray.data.text import GPT2Bytes, tokenizer_of
    from treeprop_ray.models import hf as hf_gpt2

    hf_gpt2.write(chain, settings.model, folder)
    if settings.data.tokenizer == "gpt2":
        tokenizer = tokenizer_of(settings.data)
        assert isinstance(tokenizer, GPT2Bytes)
        tokenizer.bpe.save_pretrained(folder)
    print(f"wrote {', '.join(sorted(p.name for p in folder.iterdir()))} to {folder}")


def write_torch_gru(network: TimeNetwork, folder: Path) -> None:
    """gru.safetensors and readout.safetensors: weights of a torch.nn.GRU and torch.nn.Linear."""
    from safetensors.torch import save_file

    from treeprop_ray.core.cells import GRUCell
    from treeprop_ray.models.rnn import as_torch_gru

    parts = network.parts()
    cell, readout = parts["f0"], parts["readout"]
    if isinstance(cell, GRUCell):
        made = as_torch_gru(cell, readout)  # type: ignore[arg-type]
        save_file(made.gru.state_dict(), folder / "gru.safetensors")
        save_file(made.readout.state_dict(), folder / "readout.safetensors")


def write(module: nn.Module, example: Tensor, folder: Path, info: dict[str, Any]) -> None:
    """Write a plain module as program, weights and description. `example`: at least two inputs."""
    import torch
    from safetensors.torch import save_file

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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.export`."""
    return cli.main(__doc__ or "", ExportSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
