"""The parts of a network out of a Hugging Face folder, for a run that starts from its weights.

A folder has the layers of the chain; auxiliary blocks take the layer in the middle of their
interval, as `from_pretrained` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from treeprop_ray.core.network import edge_name, named
from treeprop_ray.core.tree import Tree
from treeprop_ray.errors import UserError
from treeprop_ray.models import gpt
from treeprop_ray.models.hf import LAYER
from treeprop_ray.models.pretrained import Stem, TreeNetwork, load_model, middle

States = dict[str, Mapping[str, Tensor]]  # part -> its tensors


def is_folder(path: Path) -> bool:
    """Whether Transformers wrote (or could read) this folder."""
    return (path / "config.json").is_file() and '"model_type"' in (path / "config.json").read_text()


def is_gpt(stem: nn.Module | None) -> bool:
    """Whether parts are those of model.name=gpt (else: of `from_pretrained`)."""
    if not isinstance(stem, gpt.Embedding | Stem):
        raise UserError(
            "is a Hugging Face model; the network must be one of from_pretrained or model.name=gpt"
        )
    return isinstance(stem, gpt.Embedding)


def read(folder: str, tree: Tree, as_gpt: bool) -> States:
    """The state of every part of a tree."""
    model, _ = load_model(folder)
    layers = model.config.num_hidden_layers
    if layers not in ((tree.N - 1, tree.N) if as_gpt else (tree.N - 1,)):
        raise UserError(f"has {layers} layers, the network has {tree.N - 1}")
    if not as_gpt:
        network = TreeNetwork.from_pretrained(model, split=tree.split)
        return {name: part.state_dict() for name, part in named(network.parts()).items()}
    if type(model).__name__ != "GPT2LMHeadModel":
        raise UserError(f"is a {type(model).__name__}; model.name=gpt needs a GPT2LMHeadModel")
    state = model.transformer.state_dict()
    parts: States = {
        "stem": {"tokens.weight": state["wte.weight"], "positions": state["wpe.weight"]}
    }
    for edge in tree.blocks:
        if edge != tree.head:
            parts[edge_name(edge)] = gpt_block(state, middle(edge))
    head = {f"norm.{key}": state[f"ln_f.{key}"] for key in ("weight", "bias")}
    if layers == tree.N:  # the last one stands before the head
        head |= {f"block.{key}": value for key, value in gpt_block(state, layers - 1).items()}
    parts[edge_name(tree.head)] = head
    return parts


def gpt_block(state: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """One of our blocks out of GPT-2's layer; linear maps are stored transposed there."""
    block = {}
    for theirs, ours in LAYER.items():
        for key in ("weight", "bias"):
            value = state[f"h.{layer}.{theirs}.{key}"]
            block[f"{ours}.{key}"] = value.T.contiguous() if value.dim() == 2 else value
    return block
