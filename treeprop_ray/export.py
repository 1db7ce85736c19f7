"""Write a trained path as a plain PyTorch network that needs nothing of this package.

    python -m treeprop_ray.export run=results/runs/<name>                  # the full chain
    python -m treeprop_ray.export run=results/runs/<name> path=spine-2 to=short

Writes into the folder `to`: model.pt2 (the program: `torch.export.load("model.pt2").module()`),
model.safetensors and model.pt (the weights, `torch.load(..., weights_only=True)`), and model.json
(path, layers, input shape, parameters). The deployed chain of a GRU also as gru.safetensors and
readout.safetensors: `torch.nn.GRU(S, H, batch_first=True)` and `torch.nn.Linear(H, classes)`; of an
own cell (model.recurrent=true) as cell.safetensors and readout.safetensors: what its factory gave.

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

from treeprop_ray import config
from treeprop_ray.config import cli
from treeprop_ray.inference.settings import ExportSettings


def load(words: Sequence[str]) -> ExportSettings:
    """Settings from command-line words."""
    settings: ExportSettings = config.merge(ExportSettings, ("", config.parse_overrides(words)))
    return settings


def run(settings: ExportSettings) -> None:
    """The export command."""
    from treeprop_ray.inference.export import export

    folder = export(settings)
    print(f"wrote {', '.join(sorted(p.name for p in folder.iterdir()))} to {folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.export`."""
    return cli.main(__doc__ or "", ExportSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
