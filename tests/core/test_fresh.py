"""A fresh copy draws every parameter by a rule that fits, or says which one it cannot."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import treeprop_ray.core.vision  # noqa: F401 (before transformers)
from treeprop_ray.core.fresh import fresh_copy
from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.errors import UserError

X = torch.randn(4, 5)


def hub_layers() -> dict[str, nn.Module]:
    """Layers of four families, with weights far from any initialisation."""
    pytest.importorskip("transformers")
    from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.vit.modeling_vit import ViTLayer

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    layers = {
        "gpt2": GPT2Block(GPT2Config(n_embd=64, n_head=2, n_layer=8), layer_idx=0),
        "llama": LlamaDecoderLayer(LlamaConfig(**sizes, num_key_value_heads=2), 0),
        "bert": BertLayer(BertConfig(**sizes)),
        "vit": ViTLayer(ViTConfig(**sizes)),
    }
    for layer in layers.values():
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 7.0)
    return layers


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "vit"])
def test_hugging_face_layers_are_drawn_as_their_model_draws_them(family: str) -> None:
    twin = fresh_copy(hub_layers()[family])
    for name, parameter in twin.named_parameters():
        if parameter.dim() == 1:
            constant = 0.0 if name.endswith("bias") else 1.0
            assert (parameter == constant).all(), name
        else:
            scaled = family == "gpt2" and "c_proj" in name
            std = 0.02 / 4 if scaled else 0.02  # 2 * 8 additions to the residual stream
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.1), name


def test_a_layer_inside_a_block_of_ones_own_is_drawn_too() -> None:
    wrapped = nn.Sequential(nn.Linear(64, 64), hub_layers()["vit"])
    assert all((p != 7).all() for p in fresh_copy(wrapped).parameters())


def test_attention_of_torch_is_drawn_as_its_constructor_does() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    twin = fresh_copy(layer)
    assert not torch.equal(twin.self_attn.in_proj_weight, layer.self_attn.in_proj_weight)
    assert (twin.self_attn.out_proj.bias == 0).all() and (twin.self_attn.in_proj_bias == 0).all()
    bound = (6 / (32 + 96)) ** 0.5
    assert float(twin.self_attn.in_proj_weight.detach().abs().max()) <= bound


class Scale(nn.Module):
    """A block with a parameter that only its author can initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(5, 5), nn.Parameter(torch.ones(5))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gain * self.linear(z)
        return out


def test_a_parameter_without_a_rule_is_named() -> None:
    blocks = [Scale() for _ in range(3)]
    with pytest.raises(UserError, match=r"^auxiliary block 0-2: .* gain of Scale; pass auxiliary="):
        TreeNetwork.from_blocks(None, blocks, nn.Linear(5, 2), example=X)
    TreeNetwork.from_blocks(
        None, blocks, nn.Linear(5, 2), example=X, auxiliary=lambda l, r: Scale()
    )


def test_a_block_that_cannot_be_copied_is_named() -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 5)
            self.lock = threading.Lock()

    blocks = [Locked() for _ in range(3)]
    says = r"^auxiliary block 0-2: Locked cannot be copied: .*lock.*; pass auxiliary="
    with pytest.raises(UserError, match=says):
        TreeNetwork.from_blocks(None, blocks, nn.Linear(5, 2), example=X)


def test_one_module_for_several_blocks_is_refused() -> None:
    block = nn.Linear(5, 5)
    with pytest.raises(UserError, match=r"^block 1, block 2, block 3: one module .*deepcopy"):
        TreeNetwork.from_blocks(None, [block] * 3, nn.Linear(5, 2), example=X)
    copies = [copy.deepcopy(block) for _ in range(3)]
    TreeNetwork.from_blocks(None, copies, nn.Linear(5, 2), example=X)
    copies[2].weight = copies[0].weight
    with pytest.raises(UserError, match=r"^block 1, block 3: one tensor, weight, .*deepcopy"):
        TreeNetwork.from_blocks(None, copies, nn.Linear(5, 2), example=X)
    norm = nn.BatchNorm1d(5, affine=False)  # no parameters, but means that training moves
    normed = [nn.Sequential(nn.Linear(5, 5), norm) for _ in range(3)]
    with pytest.raises(UserError, match=r"^block 1, block 2: one tensor, 1.running_mean, "):
        TreeNetwork.from_blocks(None, normed, nn.Linear(5, 2), example=X)
    seven = [copy.deepcopy(block) for _ in range(7)]
    with pytest.raises(UserError, match=r"^0-2, 0-4, 2-4, 4-6: one module .*deepcopy"):
        TreeNetwork.from_blocks(
            None, seven, nn.Linear(5, 2), example=X, auxiliary=lambda l, r: block
        )
