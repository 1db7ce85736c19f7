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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.core import network as core
from treeprop_ray.core.inputs import Inputs
from treeprop_ray.core.network import edge_name, grouped_tree, tree_blocks
from treeprop_ray.core.rng import seeded
from treeprop_ray.core.states import spec_of
from treeprop_ray.core.tree import Edge
from treeprop_ray.errors import UserError, first_line, warn
from treeprop_ray.models.anatomy import ANATOMIES, Anatomy, Head, Layer, Stem, anatomy_of

AUXILIARY = ("middle", "fresh")
READERS = {
    True: ("*processor_config.json",),
    False: ("*token*", "vocab.*", "*.model"),
}  # their files


class TreeNetwork(core.TreeNetwork):
    """A tree network that knows its way to and from Hugging Face."""

    source: tuple[type, Any, Anatomy] | None = None  # class, config and anatomy of the model
    tokenizer: Any = None  # of a folder; of pictures the image processor
    generation: Any = None  # the model's settings for `generate`

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
        Samples are tokens, or a dict with `input_ids` and `attention_mask` (of BERT and RoBERTa
        `token_type_ids` too), which attention heeds. With `padding=True` it leaves out what is
        padding by the config where samples have no mask. Known models: GPT-2, Llama, BERT, RoBERTa,
        ViT.
        """
        if auxiliary not in AUXILIARY:
            raise UserError(f"auxiliary={auxiliary}: one of {', '.join(AUXILIARY)}")
        tokenizer = None
        if isinstance(model, str | Path):
            model, tokenizer = load_model(str(model))
        anatomy = anatomy_of(model)
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
        spec = spec_of(dict.fromkeys(stem.context, 0)) if stem.context else None
        made = cls(tree, stem, blocks, "gaussian", spec, plain=not stem.takes)
        made.source, made.tokenizer = (type(model), model.config, anatomy), tokenizer
        made.generation = getattr(model, "generation_config", None)
        return made

    def reads(self, inputs: Inputs | None) -> None:
        """Samples have these tensors (None: tokens or pictures alone); a mask is for all layers."""
        super().reads(inputs)
        stem = self.stem
        if not isinstance(stem, Stem):
            return
        kind = type(self).__name__ if self.source is None else self.source[0].__name__
        if inputs:
            known = ", ".join(stem.takes) or "one tensor"
            for name in inputs.names:
                if not inputs.named or name not in stem.takes:
                    raise UserError(f"columns: {kind} takes {known}, not {name}")
            if "input_ids" not in inputs.names:
                raise UserError(f"columns: {kind} needs input_ids, samples have {inputs}")
            for name, (shape, dtype) in zip(inputs.names, inputs.kinds, strict=True):
                if shape != inputs.shapes[inputs.names.index("input_ids")]:
                    raise UserError(f"columns: {name} has samples of shape {shape}, not input_ids'")
                if dtype.is_floating_point and name != "attention_mask":
                    raise UserError(f"columns: {name} must be whole numbers, not {dtype}")
        stem.told = inputs is not None and "attention_mask" in inputs.names
        self.context = spec_of(dict.fromkeys(stem.context, 0)) if stem.context else None

    def check_samples(self, given: Any, y: Tensor) -> None:
        """Raise UserError where a causal model is given its own tokens as labels; warn where
        attention reads padding."""
        stem = self.stem
        if not isinstance(stem, Stem):
            return
        x = given["input_ids"] if isinstance(given, dict) else given
        if x.is_floating_point() or x.ndim != 2:
            return
        pad = getattr(stem.config, "pad_token_id", None)
        if pad is not None and not (stem.padding or stem.told) and bool((x[:, -1] == pad).any()):
            warn(
                f"samples end in pad_token_id={pad}, which attention reads; "
                "from_pretrained(…, padding=True) leaves it out"
            )
        if stem.causal and torch.equal(x, y) and x.unique().numel() > 1:
            raise UserError(
                "labels: are the tokens themselves, which the model sees; give the next ones: "
                "fit(network, tokens[:, :-1], tokens[:, 1:])"
            )

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
        by_place = "scale_attn_by_inverse_layer_idx"
        if getattr(self.source[1], by_place, False) and indices != self.tree.chain:
            raise UserError(
                f"path={path}: its layers would stand at other places, on which their attention "
                f"depends ({by_place}); save path=full"
            )
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
        if self.generation is not None:
            model.generation_config = copy.deepcopy(self.generation)
        return model.to(next(self.parameters()).dtype).eval()


def known_model(name: str) -> tuple[Any, Any]:
    """The class that a model's config names, and the config."""
    import transformers

    import treeprop_ray.core.vision  # noqa: F401  (transformers imports torchvision)

    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as e:  # the hub, a damaged file, a config of another version
        raise UserError(f"{name}: cannot be loaded by transformers: {first_line(e)}") from e
    kind = (config.architectures or [""])[0]
    if kind not in ANATOMIES:
        known = ", ".join(ANATOMIES)
        raise UserError(f"{name}: is a {kind or config.model_type}; known: {known}")
    return getattr(transformers, kind), config


def meta_model(name: str) -> Any:
    """A model without numbers: only its config is read."""
    kind, config = known_model(name)
    with torch.device("meta"):
        return kind(config)


def load_model(name: str) -> tuple[Any, Any]:
    """A model of the class that its config names, in float32, and its tokenizer (of pictures the
    image processor) if it has one."""
    import transformers

    kind, _ = known_model(name)
    try:
        model = kind.from_pretrained(name, dtype=torch.float32)
    except Exception as e:
        raise UserError(f"{name}: cannot be loaded by transformers: {first_line(e)}") from e
    pictures = model.main_input_name == "pixel_values"
    if Path(name).is_dir() and not any(any(Path(name).glob(file)) for file in READERS[pictures]):
        return model, None  # Transformers would make up an empty one
    auto = transformers.AutoImageProcessor if pictures else transformers.AutoTokenizer
    try:
        return model, auto.from_pretrained(name)
    except Exception:  # a repository may lack it
        return model, None


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
