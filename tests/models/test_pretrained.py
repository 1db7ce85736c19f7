"""Hugging Face models in and out: their logits, layers as blocks, any path as a plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_network
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from warm import warm_ray

import treeprop_ray.core.vision  # noqa: F401  (before transformers, which imports torchvision)
from treeprop_ray import TreeNetwork, fit
from treeprop_ray.core.network import named
from treeprop_ray.errors import UserError
from treeprop_ray.run.initial import HuggingFace

import transformers as hf  # isort: skip

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
TEXT = {**SMALL, "vocab_size": 50, "max_position_embeddings": 32}
ENGINES: list[dict[str, Any]] = [{}, {"engine": "ray", "placement": "packed", "hosts": 2}]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with warm_ray():
        yield


def tokens() -> Tensor:
    return torch.randint(2, 50, (8, 9), generator=torch.Generator().manual_seed(1))


def gpt2(layers: int = 4) -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=layers, n_head=2)
    )


def llama(layers: int = 4) -> Any:
    words = {**TEXT, "num_hidden_layers": layers, "num_key_value_heads": 1, "pad_token_id": 0}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**words))


def bert(layers: int = 3) -> Any:
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, num_hidden_layers=layers))


def bert_classes(layers: int = 3) -> Any:
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_hidden_layers=layers))


def roberta(layers: int = 3) -> Any:
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT, num_hidden_layers=layers, pad_token_id=1))


def vit(layers: int = 3) -> Any:
    words = {**SMALL, "num_hidden_layers": layers, "image_size": 8, "patch_size": 4}
    return hf.ViTForImageClassification(hf.ViTConfig(**words, num_labels=5))


MODELS: dict[str, tuple[Callable[..., Any], Callable[[], Tensor]]] = {
    "gpt2": (gpt2, tokens), "llama": (llama, tokens), "bert": (bert, tokens),
    "bert_classes": (bert_classes, tokens), "roberta": (roberta, tokens),
    "vit": (vit, lambda: torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))),
}  # fmt: skip


def model_of(name: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    return make().eval(), inputs()


@torch.no_grad()
def logits_of(network: TreeNetwork, x: Tensor) -> Tensor:
    out: Tensor = network.eval().chain()(x)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_the_chain_has_the_models_logits_and_comes_back_as_the_model(
    name: str, tmp_path: Path
) -> None:
    model, x = model_of(name)
    with torch.no_grad():
        expected = model(x).logits
    network = TreeNetwork.from_pretrained(model)
    assert torch.equal(logits_of(network, x), expected)
    network.save_pretrained(tmp_path / "full")
    again = type(model).from_pretrained(tmp_path / "full").eval()
    with torch.no_grad():
        assert torch.equal(again(x).logits, expected)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    taken_up = TreeNetwork.from_pretrained(str(tmp_path / "full"))
    assert torch.equal(logits_of(taken_up, x), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_eager_attention_has_its_masks(name: str) -> None:
    """Without one it would see what comes; sdpa is causal by itself."""
    model, x = model_of(name)
    model.set_attn_implementation("eager")
    x[:4, 6:] = model.config.pad_token_id = 0
    for padding in (False, True):
        there = x != 0 if padding else torch.ones_like(x).bool()
        with torch.no_grad():
            expected = model(x, attention_mask=there.long()).logits
        network = TreeNetwork.from_pretrained(model, padding=padding)
        torch.testing.assert_close(logits_of(network, x)[there], expected[there])
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match="attn_implementation=flex_attention: one of sdpa, eager"):
        TreeNetwork.from_pretrained(model)


def test_a_folder_comes_back_with_what_is_not_weights(tmp_path: Path) -> None:
    """And in float32: half the digits lose the steps of an optimizer."""
    model, x = model_of("gpt2")
    model.generation_config.update(do_sample=True, temperature=0.7)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    network = TreeNetwork.from_pretrained(tmp_path / "half")
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    network.save_pretrained(tmp_path / "full")
    assert hf.GenerationConfig.from_pretrained(tmp_path / "full").temperature == 0.7
    assert not list((tmp_path / "full").glob("*token*"))  # there was no tokenizer
    words = {"[UNK]": 0, "one": 1, "two": 2}
    plain = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(
        tmp_path / "half"
    )
    told = TreeNetwork.from_pretrained(tmp_path / "half")
    told.save_pretrained(tmp_path / "told", path="spine-1")
    text = hf.AutoTokenizer.from_pretrained(tmp_path / "told")
    assert text("one two three")["input_ids"] == [1, 2, 0] and text.get_vocab() == words
    with pytest.raises(UserError, match=r"^network: its weights are bfloat16.*precision=bf16"):
        fit(TreeNetwork.from_pretrained(model), x[:, :-1], x[:, 1:], batch=4)
    vit().save_pretrained(tmp_path / "vit")
    hf.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    TreeNetwork.from_pretrained(tmp_path / "vit").save_pretrained(tmp_path / "pictures")
    assert (tmp_path / "pictures" / "preprocessor_config.json").is_file()


def test_what_would_train_or_save_something_else_is_one_line(tmp_path: Path) -> None:
    model, x = model_of("gpt2")
    with pytest.raises(UserError, match=r"^labels: are the tokens themselves"):
        fit(TreeNetwork.from_pretrained(model), x, x, batch=4)
    model.config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(UserError, match=r"^path=spine-2: its layers would stand at other places"):
        TreeNetwork.from_pretrained(model).save_pretrained(tmp_path, path="spine-2")


@pytest.mark.parametrize("name", MODELS)
def test_a_short_path_is_a_model_with_fewer_layers(name: str, tmp_path: Path) -> None:
    model, x = model_of(name)
    network = TreeNetwork.from_pretrained(model, auxiliary="fresh").eval()
    network.save_pretrained(tmp_path, path="spine-1")
    short = type(model).from_pretrained(tmp_path).eval()
    assert short.config.num_hidden_layers == 1
    with torch.no_grad():
        path = network.tree.named_paths["spine-1"]
        assert torch.equal(short(x).logits, network.path(path)(x))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_several_layers_in_a_block(local_ray: None, name: str, tmp_path: Path) -> None:
    """The model's layers one by one along every path, with what they read besides the state; a fit
    with backpropagation at its end changes them all, on actors alike."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x = make(layers=6).eval(), inputs()
    with torch.no_grad():
        expected = model(x).logits
    network = TreeNetwork.from_pretrained(model, group=2, auxiliary_layers=3)
    assert network.tree.N == 4 and torch.equal(logits_of(network, x), expected)
    words = {"epochs": 1, "batch": 4, "sigma": 0.01, "alpha": 1.0, "beta": 0.0, "finish": 0.5}
    before = {k: v.clone() for k, v in network.state_dict().items()}
    other = copy.deepcopy(network)
    for each, where in zip((network, other), ENGINES, strict=True):
        fit(each, x, x.roll(-1, 1), **words, **where)
    assert all(torch.equal(other.state_dict()[k], v) for k, v in network.state_dict().items())
    after = network.state_dict()
    layers = [f"edges.{i // 2}-{i // 2 + 1}.{i}-{i + 1}." for i in range(6)]
    for layer in layers:
        assert any(not torch.equal(before[k], after[k]) for k in after if k.startswith(layer))
    network.eval().save_pretrained(tmp_path, path="spine-2")
    short = type(model).from_pretrained(tmp_path).eval()
    assert short.config.num_hidden_layers == 5  # three auxiliary layers, a block of two
    with torch.no_grad():
        assert torch.equal(short(x).logits, network.path([0, 2, 3, 4])(x))


def test_auxiliary_blocks_are_copies_of_the_middle_or_fresh() -> None:
    model, _ = model_of("gpt2")
    middle = TreeNetwork.from_pretrained(model).block((0, 2)).layer.attn.c_attn.weight
    assert torch.equal(middle, model.transformer.h[0].attn.c_attn.weight)
    fresh = TreeNetwork.from_pretrained(model, auxiliary="fresh").block((0, 2)).layer
    for key, value in model.transformer.h[0].state_dict().items():
        if value.dim() == 2:
            assert not torch.equal(fresh.state_dict()[key], value), key
    assert 0.01 < float(fresh.attn.c_attn.weight.detach().std()) < 0.03  # GPT-2's own rule


def test_padding_is_left_out_as_transformers_does() -> None:
    model, x = model_of("llama")
    x[:4, 6:] = 0
    there = x != 0
    network = TreeNetwork.from_pretrained(model, padding=True)
    with torch.no_grad():
        expected = model(x, attention_mask=there.long()).logits
    assert torch.allclose(logits_of(network, x)[there], expected[there], atol=1e-6)


def test_padding_that_attention_reads_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    _, x = model_of("bert")
    x[3, 6:] = 0
    for padding in (False, True):
        network = TreeNetwork.from_pretrained(bert_classes(), padding=padding)
        fit(network, x, torch.arange(8) % 2, batch=8, epochs=1)
        line = "warning: samples end in pad_token_id=0, which attention reads; from_pretrained"
        assert (line in capsys.readouterr().err) is not padding


def labels_of(name: str, x: Tensor) -> Tensor:
    """The next tokens, masked ones, or classes."""
    if name in ("gpt2", "llama"):
        return x.roll(-1, 1)
    return x.masked_fill(x % 3 > 0, -100) if name in ("bert", "roberta") else torch.arange(8) % 2


@pytest.mark.parametrize("name", MODELS)
def test_two_actors_train_it_as_one_process_does(local_ray: None, name: str) -> None:
    states = []
    for where in ENGINES:
        model, x = model_of(name)
        labels = labels_of(name, x)
        if name == "llama":
            x[:4, 6:] = 0  # padding
        padded = {"padding": True, "auxiliary": "fresh"} if name == "llama" else {}
        network = TreeNetwork.from_pretrained(model, **padded)
        words: dict[str, Any] = {"epochs": 2, "batch": 4, "sigma": 0.01, **where}
        fit(network, x, labels, **words)
        states.append(network.state_dict())
    one, many = states
    assert all(torch.equal(value, many[key]) for key, value in one.items())


def started(network: TreeNetwork, folder: Path, **words: Any) -> dict[str, Tensor]:
    """The weights after some steps from there."""
    words = {"epochs": 2, "batch": 4, "sigma": 0.01, "init_from": str(folder), **words}
    return fit(network, tokens(), tokens().roll(-1, 1), **words).network.state_dict()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_run_starts_from_a_folder_on_both_engines(
    local_ray: None, name: str, tmp_path: Path
) -> None:
    model, _ = model_of(name)
    model.save_pretrained(tmp_path)
    expected = TreeNetwork.from_pretrained(tmp_path).state_dict()
    states = []
    for more in ({"lr": 1e-30, "weight_decay": 0}, *ENGINES):
        torch.manual_seed(5)
        other = TreeNetwork.from_pretrained(MODELS[name][0](), auxiliary="fresh")
        states.append(started(other, tmp_path, **more))
    still, one, many = states
    for key, value in expected.items():
        assert torch.allclose(still[key], value, rtol=0, atol=1e-20)  # zeros move by the least step
        assert torch.equal(one[key], many[key]), key
    assert not all(torch.equal(one[key], value) for key, value in expected.items())


def test_blocks_that_are_run_again_get_their_context_again() -> None:
    """recompute=true with rotary embeddings: not a bit changes."""
    states = []
    for recompute in (False, True):
        model, x = model_of("llama")
        network = TreeNetwork.from_pretrained(model)
        fit(network, x[:, :-1], x[:, 1:], epochs=1, batch=4, recompute=recompute)
        states.append(network.state_dict())
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_read_from_the_files_without_the_rest(name: str, tmp_path: Path) -> None:
    model, _ = model_of(name)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    network = TreeNetwork.from_pretrained(tmp_path)
    source = HuggingFace("here", str(tmp_path), network.tree, as_gpt=False)
    assert (source.stored() is None) is (name == "vit")  # Transformers renames its tensors
    keys, shapes = source.contents(network.tree)
    for part, tensors in source.read(keys, list(named(network.parts()))):
        expected = named(network.parts())[part].state_dict()
        assert tensors.keys() == expected.keys() == shapes[part].keys()
        assert all(torch.equal(tensors[key], value) for key, value in expected.items())


def test_a_folder_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    llama(4).save_pretrained(tmp_path / "llama")
    gpt2(4).save_pretrained(tmp_path / "gpt2")
    for folder, network, says in (
        ("llama", TreeNetwork.from_pretrained(llama(3)), "has 4 layers, the network has 3"),
        ("gpt2", TreeNetwork.from_pretrained(llama(4)), "part stem: parts.1.weight has shape"),
        ("llama", tiny_network(5), "must be one of from_pretrained or model.name=gpt"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            started(network, tmp_path / folder)
        assert str(caught.value).startswith("init_from=") and "\n" not in str(caught.value)
    (tmp_path / "gpt2" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"^init_from=.*cannot be loaded by transformers"):
        started(TreeNetwork.from_pretrained(gpt2(4)), tmp_path / "gpt2")


def test_a_tied_table_has_one_owner_and_learns_from_both_ends() -> None:
    model, x = model_of("gpt2")
    network = TreeNetwork.from_pretrained(model)
    before = model.transformer.wte.weight.detach().clone()
    fit(network, x, x.roll(-1, 1), epochs=1, batch=8, lr=0.1, optimizer="sgd", momentum=0,
        weight_decay=0)  # fmt: skip
    assert model.lm_head.weight is model.transformer.wte.weight
    moved = (model.lm_head.weight - before).abs().sum(1)
    unseen = torch.ones(50, dtype=torch.bool)
    unseen[x.unique()] = False
    assert (moved[unseen] > 0).all()  # by the head's softmax


def test_a_tied_table_cannot_be_in_two_stages() -> None:
    model, x = model_of("gpt2")
    with pytest.raises(UserError, match="method=bp engine=ray: the head uses the stem's weights"):
        fit(
            TreeNetwork.from_pretrained(model), x, x.roll(-1, 1), method="bp", engine="ray", batch=4
        )


def test_what_is_not_known_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model=Linear: not known here"):
        TreeNetwork.from_pretrained(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="auxiliary=half: one of middle, fresh"):
        TreeNetwork.from_pretrained(gpt2(), auxiliary="half")
    with pytest.raises(UserError, match="cannot be loaded by transformers"):
        TreeNetwork.from_pretrained(str(tmp_path / "nothing"))
    network = TreeNetwork.from_pretrained(gpt2())
    with pytest.raises(UserError, match="path=spine-9: one of"):
        network.save_pretrained(tmp_path, path="spine-9")
