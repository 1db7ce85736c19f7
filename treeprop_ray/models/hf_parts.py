"""The parts of a network out of a Hugging Face folder, for a run that starts from its weights.

A folder has the layers of the chain; auxiliary blocks take the layer in the middle of their
interval, as `from_pretrained` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core.network import edge_name, named
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.models import gpt
from treeprop_ray.models.anatomy import Stem
from treeprop_ray.models.hf import LAYER
from treeprop_ray.models.pretrained import TreeNetwork, known_model, load_model, middle

States = dict[str, Mapping[str, Tensor]]  # part -> its tensors
Names = dict[str, dict[str, list[str]]]  # part -> its tensor -> what the model may call it


def is_folder(path: Path) -> bool:
    """Whether Transformers wrote (or could read) this folder."""
    return (path / "config.json").is_file() and '"model_type"' in (path / "config.json").read_text()


def files(folder: Path) -> list[Path]:
    """The safetensors files that Transformers would read; none where it keeps weights otherwise."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    listed = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ()
    return [folder / name for name in sorted(set(listed))]


def is_gpt(stem: nn.Module | None) -> bool:
    """Whether parts are those of model.name=gpt (else: of `from_pretrained`)."""
    if not isinstance(stem, gpt.Embedding | Stem):
        raise UserError(
            "is a Hugging Face model; the network must be one of from_pretrained or model.name=gpt"
        )
    return isinstance(stem, gpt.Embedding)


def read(folder: str, tree: Tree, as_gpt: bool) -> States:
    """The state of every part of a tree; reads the whole folder."""
    model, _ = load_model(folder)
    state = model.state_dict()
    return {
        part: {own: turned(state[keys[0]], part, as_gpt) for own, keys in tensors.items()}
        for part, tensors in names(folder, tree, as_gpt).items()
    }


def names(folder: str, tree: Tree, as_gpt: bool) -> Names:
    """What the tensors of every part of a tree are called in the folder's model."""
    kind, config = known_model(folder)
    layers = config.num_hidden_layers
    if layers not in ((tree.N - 1, tree.N) if as_gpt else (tree.N - 1,)):
        raise UserError(f"has {layers} layers, the network has {tree.N - 1}")
    if not as_gpt:
        return network_names(kind, config, tree)
    if kind.__name__ != "GPT2LMHeadModel":
        raise UserError(f"is a {kind.__name__}; model.name=gpt needs a GPT2LMHeadModel")
    parts: Names = {
        "stem": {"tokens.weight": gpt_names("wte.weight"), "positions": gpt_names("wpe.weight")}
    }
    for edge in tree.blocks:
        if edge != tree.head:
            parts[edge_name(edge)] = block_names(middle(edge))
    head = {f"norm.{key}": gpt_names(f"ln_f.{key}") for key in ("weight", "bias")}
    if layers == tree.N:  # the last one stands before the head
        head |= {f"block.{own}": keys for own, keys in block_names(layers - 1).items()}
    parts[edge_name(tree.head)] = head
    return parts


def network_names(kind: Any, config: Any, tree: Tree) -> Names:
    """For a network of `from_pretrained`, found with a model that has shapes but no numbers."""
    with torch.device("meta"):
        model = kind(config)
        network = TreeNetwork.from_pretrained(model, split=tree.split)
    called: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        called.setdefault(id(tensor), []).append(name)
    modules = named(network.parts())
    inside = [edge for edge in tree.blocks if edge != tree.head]
    copied = {edge_name(edge): edge_name((middle(edge), middle(edge) + 1)) for edge in inside}
    return {
        part: {
            own: called[id(tensor)]
            for own, tensor in modules[copied.get(part, part)].state_dict(keep_vars=True).items()
        }
        for part in modules
    }


def gpt_names(name: str) -> list[str]:
    """A tensor of GPT-2 in the language model and in the bare one."""
    return [f"transformer.{name}", name]


def block_names(layer: int) -> dict[str, list[str]]:
    """One of our blocks in GPT-2's layer."""
    return {
        f"{ours}.{key}": gpt_names(f"h.{layer}.{theirs}.{key}")
        for theirs, ours in LAYER.items()
        for key in ("weight", "bias")
    }


def turned(tensor: Tensor, part: str, as_gpt: bool) -> Tensor:
    """As our part has it: GPT-2 stores the linear maps of its layers transposed."""
    turns = as_gpt and part != "stem" and tensor.dim() == 2
    return tensor.T.contiguous() if turns else tensor
