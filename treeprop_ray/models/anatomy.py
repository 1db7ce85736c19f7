"""What Hugging Face models are made of, as stem, layers and head of a tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treeprop_ray.errors import UserError

ATTENTION = ("sdpa", "eager")  # ways to compute it; each wants its masks in a form of its own


@dataclass(frozen=True)
class Anatomy:
    """Where a model keeps stem, layers and head: names of its modules."""

    stem: tuple[str, ...]
    layers: str
    head: tuple[str, ...]
    rotary: str = ""  # makes rotary embeddings from a state and positions
    causal: bool = False
    types: bool = False  # the stem takes token_type_ids
    pools: bool = False  # the head reads the first token only


ANATOMIES = {  # by the name of the model's class
    "GPT2LMHeadModel": Anatomy(
        ("transformer.wte", "transformer.wpe", "transformer.drop"), "transformer.h",
        ("transformer.ln_f", "lm_head"), causal=True,
    ),
    "LlamaForCausalLM": Anatomy(
        ("model.embed_tokens",), "model.layers", ("model.norm", "lm_head"), "model.rotary_emb", True
    ),
    "BertForMaskedLM": Anatomy(("bert.embeddings",), "bert.encoder.layer", ("cls",), types=True),
    "BertForSequenceClassification": Anatomy(
        ("bert.embeddings",), "bert.encoder.layer", ("bert.pooler", "dropout", "classifier"),
        types=True,
    ),
    "RobertaForMaskedLM": Anatomy(
        ("roberta.embeddings",), "roberta.encoder.layer", ("lm_head",), types=True
    ),
    "RobertaForSequenceClassification": Anatomy(
        ("roberta.embeddings",), "roberta.encoder.layer", ("classifier",), types=True
    ),
    "ViTForImageClassification": Anatomy(
        ("vit.embeddings",), "vit.layers", ("vit.layernorm", "classifier"), pools=True
    ),
}  # fmt: skip


class Stem(nn.Module):
    """Everything before the first layer; makes the context where layers need one.

    It takes tokens (of ViT pictures), or a dict with `input_ids` and what `takes` names.
    """

    def __init__(self, model: Any, anatomy: Anatomy, padding: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(model.get_submodule(name) for name in anatomy.stem)
        self.rotary = model.get_submodule(anatomy.rotary) if anatomy.rotary else None
        self.padding, self.config = padding, model.config
        self.told = False  # samples have an attention_mask
        self.takes: tuple[str, ...] = () if anatomy.pools else ("input_ids", "attention_mask")
        self.takes += ("token_type_ids",) if anatomy.types else ()
        self.causal = anatomy.causal or bool(getattr(model.config, "is_decoder", False))
        self.eager = model.config._attn_implementation == "eager"

    @property
    def context(self) -> list[str]:
        """The names of what the layers read besides the state."""
        by_itself = not (self.causal and self.eager)  # sdpa is causal without a mask
        masked = self.padding or self.told or not by_itself
        return [*(["cos", "sin"] if self.rotary is not None else []), *(["mask"] if masked else [])]

    def forward(self, given: Tensor | Mapping[str, Tensor]) -> Any:
        """z_0; with it the context, if layers read rotary embeddings or a mask of padding."""
        several = given if isinstance(given, Mapping) else {}
        x = several["input_ids"] if isinstance(given, Mapping) else given
        first, *rest = self.parts
        if len(rest) == 2:  # GPT-2: tokens, positions, dropout
            positions, dropout = rest
            z: Tensor = dropout(first(x) + positions(torch.arange(x.shape[1], device=x.device)))
        elif "token_type_ids" in several:
            z = first(x, token_type_ids=several["token_type_ids"])
        else:
            z = first(x)
        context: dict[str, Tensor] = {}
        if self.rotary is not None:
            places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            context["cos"], context["sin"] = self.rotary(z, position_ids=places)
        if "attention_mask" in several or "mask" in self.context:
            if (told := several.get("attention_mask")) is not None:
                mask = attention(told != 0, self.causal)
            else:
                mask = padding_mask(self._there(x), self.causal)
            context["mask"] = added(mask, z.dtype) if self.eager else mask
        return (z, context) if context else z

    def _there(self, x: Tensor) -> Tensor:
        """Which tokens are no padding by the config."""
        return x != self.config.pad_token_id if self.padding else torch.ones_like(x).bool()


def visible(there: Tensor, causal: bool) -> Tensor:
    """Which tokens (B, 1, T, T) a token may look at: those that are there, and before it."""
    length = there.shape[1]
    mask = there[:, None, None, :].expand(-1, 1, length, -1)
    if causal:
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=there.device).tril()
    return mask


def padding_mask(there: Tensor, causal: bool) -> Tensor:
    """The same; padding looks at itself too, so that it sees something."""
    return visible(there, causal) | torch.eye(there.shape[1], dtype=torch.bool, device=there.device)


def attention(there: Tensor, causal: bool) -> Tensor:
    """The same for an attention_mask as Transformers takes it; what sees nothing sees itself."""
    mask = visible(there, causal)
    alone = torch.eye(there.shape[1], dtype=torch.bool, device=there.device)
    return mask | (~mask.any(-1, keepdim=True) & alone)


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers that are added to the scores of attention."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


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


def anatomy_of(model: Any) -> Anatomy:
    """The anatomy of a model; UserError for one that is not known here."""
    anatomy = ANATOMIES.get(type(model).__name__)
    if anatomy is None:
        known = ", ".join(ANATOMIES)
        raise UserError(f"model={type(model).__name__}: not known here; one of {known}")
    kind = model.config._attn_implementation
    if kind not in ATTENTION:
        raise UserError(f"attn_implementation={kind}: one of {', '.join(ATTENTION)}")
    return anatomy
