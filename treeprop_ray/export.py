"""Write a trained path as a plain PyTorch network that needs nothing of this package.

    python -m treeprop_ray.export run=results/runs/<name>                  # the full chain
    python -m treeprop_ray.export run=results/runs/<name> path=spine-2 to=short

Writes into the folder `to`: model.pt2 (the program: `torch.export.load("model.pt2").module()`),
model.safetensors and model.pt (the weights, `torch.load(..., weights_only=True)`), and model.json
(path, layers, input shape, parameters). The deployed chain of a GRU also as gru.safetensors and
readout.safetensors: `torch.nn.GRU(S, H, batch_first=True)` and `torch.nn.Linear(H, classes)`.

path=adaptive, after `evaluate mode=adaptive`, writes the parts of all exits as programs with the
calibration and early_exit.py, which runs them and needs torch alone.

A language model with format=hf is written as Hugging Face's GPT-2 instead, a short path as one with
fewer layers: `transformers.GPT2LMHeadModel.from_pretrained(folder)`; one's own network that is of
`TreeNetwork.from_pretrained`, as the model it came from. The default folder is then
<run>/export/<path>-hf.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeprop_ray import cli, config
from treeprop_ray.config import opt
from treeprop_ray.errors import UserError


@dataclass
class ExportSettings:
    """Settings of the export command."""

    run: str = opt("", "run folder, e.g. results/runs/<name>")
    checkpoint: str = opt("last", "last, best or a step number")
    path: Any = opt(
        "full", "full, spine-k, indices such as [0,4,6,7,8], or adaptive: samples stop early"
    )
    format: str = opt(
        "plain", "a PyTorch program, or a model of Hugging Face's", choices=["plain", "hf"]
    )
    to: str = opt("", "target folder; default: <run>/export/<path>")
    data_root: str | None = opt(None, "hub folder, if it has moved since the run")
    storage: str = opt("", "where the checkpoints lie, if config.yaml of the run names a URL")


def load(words: Sequence[str]) -> ExportSettings:
    """Settings from command-line words."""
    settings: ExportSettings = config.merge(ExportSettings, ("", config.parse_overrides(words)))
    return settings


def run(settings: ExportSettings) -> None:
    """The export command."""
    import torch

    from treeprop_ray import methods
    from treeprop_ray.core.network import TreeNetwork
    from treeprop_ray.inference.adaptive import stored, with_exits
    from treeprop_ray.inference.export import (
        write,
        write_adaptive,
        write_hf,
        write_pretrained,
        write_torch_gru,
    )
    from treeprop_ray.inference.paths import as_path_text, parse_path
    from treeprop_ray.models.rnn import TimeNetwork
    from treeprop_ray.run.folder import run_settings
    from treeprop_ray.run.reading import open_run

    is_hf = settings.format == "hf"
    name_of = run_settings(settings.run).model.name
    if is_hf and name_of != "gpt" and not config.dotted(name_of):
        raise UserError(f"format=hf: the run has model.name={name_of}; needs gpt")
    opened = open_run(settings.run, settings.checkpoint, settings.data_root, settings.storage)
    of_run, samples, point, network = opened
    text = as_path_text(settings.path)
    method = methods.of(of_run)
    outline = method.outline(of_run, network.tree)
    if text == "adaptive" and is_hf:
        raise UserError("path=adaptive: has no form in Hugging Face; use format=plain")
    adapts = text == "adaptive"
    trained = with_exits(network, of_run) if adapts else None
    path = network.tree.chain if adapts else parse_path(text, outline, method)
    known = {"adaptive": path, **network.tree.named_paths, **outline.paths}
    name = (text if text in known else "-".join(map(str, path))) + ("-hf" if is_hf else "")
    folder = Path(settings.to) if settings.to else Path(settings.run) / "export" / name
    if folder.exists() and not folder.is_dir():
        raise UserError(f"to={settings.to}: is a file, must be a folder")
    if is_hf:
        assert isinstance(network, TreeNetwork)
        if config.dotted(name_of):
            write_pretrained(network, of_run, samples.shape, path, folder)
        else:
            write_hf(network.path(path), of_run, folder)
    else:
        about = {
            "experiment": of_run.experiment, "run": point.meta, "path": path, "data": samples.name,
        }  # fmt: skip
        held = len(samples.test) > 1
        x = samples.read("test", slice(0, 2)).x if held else torch.cat([samples.example.x] * 2)
        inputs, example = samples.shape.form, samples.inputs(x)
        given = inputs.unpack(example) if inputs else example
        if trained is not None:
            found = stored(settings.run, point.meta["step"])
            write_adaptive(trained, found, given, folder, {**about, "path": text})
        else:
            write(network.path(path), given, folder, about)
        if not adapts and isinstance(network, TimeNetwork) and path == network.tree.chain:
            write_torch_gru(network, folder)
    print(f"wrote {', '.join(sorted(p.name for p in folder.iterdir()))} to {folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.export`."""
    return cli.main(__doc__ or "", ExportSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
