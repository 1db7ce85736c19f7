"""Hugging Face models as trees, and any path of a tree as a plain Hugging Face model again.

    network = TreeNetwork.from_pretrained("openai-community/gpt2")    # or a folder, or a model
    fit(network, tokens, next_tokens, …)
    network.save_pretrained("out", path="spine-2")                    # AutoModel….from_pretrained

The layers of the model are the chain's blocks, what stands before them is the stem, what stands
behind them the head; a layer of the model is one block. What all layers read besides the state (the
attention mask, rotary embeddings) is made once, by the stem, and travels as the tree's context.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core import network as core
from treeprop_ray.core.network import edge_name, grouped_tree, tree_blocks
from treeprop_ray.core.rng import seeded
from treeprop_ray.core.states import spec_of
from treeprop_ray.core.tree import Edge
from treeprop_ray.errors import UserError, first_line

AUXILIARY = ("middle", "fresh")


@dataclass(frozen=True)
class Anatomy:
    """Where a model keeps stem, layers and head: names of its modules."""

    stem: tuple[str, ...]
    layers: str
    head: tuple[str, ...]
    rotary: str = ""  # makes rotary embeddings from a state and positions
    causal: bool = False
    pools: bool = False  # the head reads the first token only


ANATOMIES = {  # by the name of the model's class
    "GPT2LMHeadModel": Anatomy(
        ("transformer.wte", "transformer.wpe", "transformer.drop"), "transformer.h",
        ("transformer.ln_f", "lm_head"), causal=True,
    ),
    "LlamaForCausalLM": Anatomy(
        ("model.embed_tokens",), "model.layers", ("model.norm", "lm_head"), "model.rotary_emb", True
    ),
    "BertForMaskedLM": Anatomy(("bert.embeddings",), "bert.encoder.layer", ("cls",)),
    "BertForSequenceClassification": Anatomy(
        ("bert.embeddings",), "bert.encoder.layer", ("bert.pooler", "dropout", "classifier")
    ),
    "RobertaForMaskedLM": Anatomy(("roberta.embeddings",), "roberta.encoder.layer", ("lm_head",)),
    "RobertaForSequenceClassification": Anatomy(
        ("roberta.embeddings",), "roberta.encoder.layer", ("classifier",)
    ),
    "ViTForImageClassification": Anatomy(
        ("vit.embeddings",), "vit.layers", ("vit.layernorm", "classifier"), pools=True
    ),
}  # fmt: skip


class Stem(nn.Module):
    """Everything before the first layer; makes the context where layers need one."""

    def __init__(self, model: Any, anatomy: Anatomy, padding: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(model.get_submodule(name) for name in anatomy.stem)
        self.rotary = model.get_submodule(anatomy.rotary) if anatomy.rotary else None
        self.padding, self.config, self.causal = padding, model.config, anatomy.causal

    def forward(self, x: Tensor) -> Any:
        """z_0; with it the context, if layers read rotary embeddings or a mask of padding."""
        first, *rest = self.parts
        if len(rest) == 2:  # GPT-2: tokens, positions, dropout
            positions, dropout = rest
            z: Tensor = dropout(first(x) + positions(torch.arange(x.shape[1], device=x.device)))
        else:
            z = first(x)
        context: dict[str, Tensor] = {}
        if self.rotary is not None:
            places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            context["cos"], context["sin"] = self.rotary(z, position_ids=places)
        if self.padding:
            context["mask"] = padding_mask(x != self.config.pad_token_id, self.causal)
        return (z, context) if context else z


def padding_mask(there: Tensor, causal: bool) -> Tensor:
    """Which tokens (B, 1, T or 1, T) a token may look at; padding looks at itself alone."""
    length = there.shape[1]
    mask = there[:, None, None, :].expand(-1, 1, length, -1)
    if causal:
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=there.device).tril()
    return mask | torch.eye(length, dtype=torch.bool, device=there.device)


class Layer(nn.Module):
    """One layer of the model, from state to state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        z: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The next state; without a mask attention is causal where the model's is."""
        more: dict[str, Any] = {} if cos is None else {"position_embeddings": (cos, sin)}
        out = self.layer(z, attention_mask=mask, **more)
        state: Tensor = out[0] if isinstance(out, tuple) else out
        return state


class Head(nn.Module):
    """Everything behind the last layer."""

    def __init__(self, model: Any, anatomy: Anatomy) -> None:
        super().__init__()
        self.parts = nn.ModuleList(model.get_submodule(name) for name in anatomy.head)
        self.pools = anatomy.pools

    def forward(self, z: Tensor) -> Tensor:
        """Logits."""
        for part in self.parts[:-1]:
            z = part(z)
        out: Tensor = self.parts[-1](z[:, 0] if self.pools else z)
        return out


class TreeNetwork(core.TreeNetwork):
    """A tree network that knows its way to and from Hugging Face."""

    source: tuple[type, Any, Anatomy] | None = None  # class, config and anatomy of the model
    tokenizer: Any = None

    @classmethod
    def from_pretrained(
        cls,
        model: Any,
        *,
        auxiliary: str = "middle",
        group: int | Sequence[int] = 1,
        auxiliary_layers: int = 1,
        padding: bool = False,
        split: str = "floor",
        seed: int = 1,
    ) -> TreeNetwork:
        """A tree over the layers of a Hugging Face model: its name, a folder, or the model itself.

        Auxiliary blocks start as copies of the layer in the middle of their interval (`middle`) or
        as freshly initialised layers (`fresh`); `group` and `auxiliary_layers` as in `from_blocks`.
        With `padding=True` attention leaves out what is
        padding by the config. Known models: GPT-2, Llama, BERT, RoBERTa, ViT.
        """
        if auxiliary not in AUXILIARY:
            raise UserError(f"auxiliary={auxiliary}: one of {', '.join(AUXILIARY)}")
        tokenizer = None
        if isinstance(model, str | Path):
            model, tokenizer = load_model(str(model))
        anatomy = ANATOMIES.get(type(model).__name__)
        if anatomy is None:
            known = ", ".join(ANATOMIES)
            raise UserError(f"model={type(model).__name__}: not known here; one of {known}")
        layers = list(model.get_submodule(anatomy.layers))
        tree = grouped_tree(len(layers), split, group, auxiliary_layers)

        def layer(edge: Edge, in_chain: bool) -> nn.Module:
            if in_chain:
                return Layer(layers[edge[0]])
            with seeded(seed, "init", edge_name(edge)):
                return Layer(auxiliary_layer(model, layers, edge, auxiliary))

        blocks = tree_blocks(tree, layer)
        if padding and (anatomy.pools or model.config.pad_token_id is None):
            raise UserError(f"padding=True: {type(model).__name__} has no pad_token_id")
        stem = Stem(model, anatomy, padding)
        blocks[tree.head] = Head(model, anatomy)
        context = [*(["cos", "sin"] if anatomy.rotary else []), *(["mask"] if padding else [])]
        spec = spec_of(dict.fromkeys(context, 0)) if context else None
        made = cls(tree, stem, blocks, "gaussian", spec)
        made.source, made.tokenizer = (type(model), model.config, anatomy), tokenizer
        return made

    def save_pretrained(self, folder: str | Path, path: str | Sequence[int] = "full") -> None:
        """Write a path as a plain Hugging Face model, loadable without this package."""
        if self.source is None:
            raise UserError("save_pretrained: the network is not of from_pretrained")
        indices = self.tree.named_paths.get(path) if isinstance(path, str) else list(path)
        if indices is None:
            names = ", ".join(self.tree.named_paths)
            raise UserError(f"path={path}: one of {names}, or a list of indices")
        try:
            layers = list(self.path(indices))[1:-1]
        except ValueError as e:
            raise UserError(str(e)) from e
        plain = self.plain_model(layers)
        plain.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def plain_model(self, blocks: Sequence[nn.Module]) -> Any:
        """A Hugging Face model with the weights of some layers, of stem and head."""
        assert self.source is not None
        kind, config, anatomy = self.source
        config = copy.deepcopy(config)
        config.num_hidden_layers = len(blocks)
        model = kind(config)
        head = self.block(self.tree.head)
        assert isinstance(self.stem, Stem) and isinstance(head, Head)
        for name, part in zip(anatomy.stem, self.stem.parts, strict=True):
            model.get_submodule(name).load_state_dict(part.state_dict())
        for name, part in zip(anatomy.head, head.parts, strict=True):
            model.get_submodule(name).load_state_dict(part.state_dict())
        for layer, block in zip(model.get_submodule(anatomy.layers), blocks, strict=True):
            assert isinstance(block, Layer)
            layer.load_state_dict(block.layer.state_dict())
        model.tie_weights()
        return model.eval()


def load_model(name: str) -> tuple[Any, Any]:
    """A model of the class that its config names, and its tokenizer if it has one."""
    import transformers

    import treeprop_ray.core.vision  # noqa: F401  (transformers imports torchvision)

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        kind = (config.architectures or [""])[0]
        if kind not in ANATOMIES:
            known = ", ".join(ANATOMIES)
            raise UserError(f"{name}: is a {kind or config.model_type}; known: {known}")
        model = getattr(transformers, kind).from_pretrained(name)
    except UserError:
        raise
    except Exception as e:  # the hub, a damaged file, a config of another version
        raise UserError(f"{name}: cannot be loaded by transformers: {first_line(e)}") from e
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception:  # pictures have none, and a folder may lack it
        tokenizer = None
    return model, tokenizer


def middle(edge: Edge) -> int:
    """The layer in the middle of an interval."""
    return (edge[0] + edge[1] - 1) // 2


def auxiliary_layer(model: Any, layers: Sequence[nn.Module], edge: Edge, kind: str) -> nn.Module:
    """A copy of the layer in the middle of an interval, or one that the model initialises anew."""
    layer = copy.deepcopy(layers[middle(edge)])
    if kind == "fresh":
        for module in layer.modules():
            module._is_hf_initialized = False  # type: ignore[assignment]
            model._init_weights(module)
    return layer
