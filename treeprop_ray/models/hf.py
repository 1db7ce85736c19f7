"""A path of a language model in the layout of Hugging Face's GPT-2; needs no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from treeprop_ray.core import tensor_file
from treeprop_ray.models.gpt import Block, Embedding, Head

if TYPE_CHECKING:
    from treeprop_ray.config import Model


LAYER = {  # a layer's modules there, and ours
    "ln_1": "norm_1", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.project",
    "ln_2": "norm_2", "mlp.c_fc": "expand", "mlp.c_proj": "contract",
}  # fmt: skip


def blocks_of(chain: nn.Sequential) -> tuple[Embedding, list[Block], Head]:
    """Stem, all blocks (the head's own one last) and head of a path."""
    parts = list(chain)
    stem, head = parts[0], parts[-1]
    assert isinstance(stem, Embedding) and isinstance(head, Head)
    blocks = [part for part in [*parts[1:-1], head.block] if isinstance(part, Block)]
    return stem, blocks, head


def state_of(chain: nn.Sequential, model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors) of `GPT2LMHeadModel` for a path; linear maps are stored transposed."""
    stem, blocks, head = blocks_of(chain)
    vocabulary, width = stem.tokens.weight.shape
    about = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocabulary,
        "n_positions": len(stem.positions),
        "n_embd": width,
        "n_layer": len(blocks),
        "n_head": model.heads,
        "n_inner": round(model.mlp_ratio * model.hidden),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": head.norm.eps,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "tie_word_embeddings": True,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
    }
    state = {"transformer.wte.weight": stem.tokens.weight, "transformer.wpe.weight": stem.positions}
    for i, block in enumerate(blocks):
        own = block.state_dict()
        for theirs, ours in LAYER.items():
            weight = own[f"{ours}.weight"]  # a matrix or a norm's
            state[f"transformer.h.{i}.{theirs}.weight"] = weight.T if weight.dim() == 2 else weight
            state[f"transformer.h.{i}.{theirs}.bias"] = own[f"{ours}.bias"]
    state["transformer.ln_f.weight"] = head.norm.weight
    state["transformer.ln_f.bias"] = head.norm.bias
    return about, {k: v.detach().cpu().contiguous().clone() for k, v in state.items()}


def write(chain: nn.Sequential, model: Model, folder: Path) -> None:
    """config.json and model.safetensors for `GPT2LMHeadModel.from_pretrained(folder)`."""
    about, state = state_of(chain, model)
    folder.mkdir(parents=True, exist_ok=True)
    tensor_file.save(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
