"""Side inputs of the blocks, blocks that return tuples, and heads that must take every exit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ray import cloudpickle
from torch import Tensor, nn
from warm import warm_ray

import treeprop_ray
import treeprop_ray.core.vision
from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.errors import UserError
from treeprop_ray.run.callbacks import Callback
from treeprop_ray.run.trainer import Trainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not have this file

B, T, W = 32, 5, 8
RAY = {"engine": "ray"}
PACKED = {"placement": "packed", "hosts": 2}
GEN = torch.Generator().manual_seed(2)
X = torch.randint(1, 9, (B, T), generator=GEN)
X[:, 3:] = X[:, 3:].masked_fill(torch.rand(B, 2, generator=GEN) < 0.5, 0)  # 0: padding
Y = X.sum(1) % 3


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """One Ray for the file: to start it costs more than a run does."""
    with warm_ray():
        yield


class Watch(Callback):
    def on_end(self, run: Trainer, summary: dict[str, Any]) -> None:
        self.summary, self.weights = summary, run.weights


class Stem(nn.Module):
    """Embeds tokens; which of them are padding goes to every block, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tokens, self.gain = kind, nn.Embedding(9, W), nn.Linear(W, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        z_0 = self.tokens(x)
        mask, scale = x != 0, self.gain(z_0).sigmoid()
        context = {"dict": {"scale": scale, "mask": mask}, "tuple": (mask, scale), "tensor": mask}
        return z_0, context[self.kind]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(
        self, z: Tensor, mask: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mean = (z * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        step = self.linear(z + mean).tanh()
        return z + (step if scale is None else scale * step), mean


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, 3)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.linear(z.mean(1))
        return out


def network(kind: str, blocks: int = 4) -> TreeNetwork:
    torch.manual_seed(0)
    chain = [Block() for _ in range(blocks)]
    return TreeNetwork.from_blocks(Stem(kind), chain, Head(), example=X[:2])


def trained(net: TreeNetwork, **settings: Any) -> Watch:
    watch = Watch()
    words = {"epochs": 2, "batch": 16, "seed": 4, "lr": 0.01, **settings}
    treeprop_ray.fit(net, X, Y, validation=(X, Y), callbacks=[watch], **words)
    return watch


@pytest.mark.parametrize(
    ("kind", "blocks", "more"),
    [
        ("dict", 4, {**PACKED, "beta": 0.3, "microbatches": 2}),
        ("dict", 3, {"placement": "per_node", "objective": "node_all_ce"}),
        ("tuple", 4, {**PACKED, "method": "bp"}),
        ("tensor", 4, {**PACKED, "beta": 0.3}),
    ],
    ids=["dict", "dict-per_node", "tuple-bp", "tensor"],
)
def test_context_reaches_every_block_on_both_engines(
    kind: str, blocks: int, more: dict[str, Any], local_ray: None
) -> None:
    here, there = (trained(network(kind, blocks), **more, **where) for where in ({}, RAY))
    assert here.weights.keys() == there.weights.keys()
    assert all(torch.equal(here.weights[k], there.weights[k]) for k in here.weights)
    assert here.summary["final"] == there.summary["final"]


def test_a_path_with_context_is_one_program(tmp_path: Any) -> None:
    net = network("dict")
    before = net.stem.gain.weight.detach().clone()
    watch = trained(net)
    assert torch.equal(before, net.stem.gain.weight)  # no gradient flows through the context
    chain = net.chain().eval()
    with torch.no_grad():
        z, context = net.stem(X)
        for i in range(4):
            z, _ = net.block((i, i + 1))(z, **context)
        expected = net.block(net.tree.head)(z)
        assert torch.equal(chain(X), expected)
    accuracy = float((expected.argmax(1) == Y).double().mean())
    assert watch.summary["final"]["validation"]["full"]["accuracy"] == accuracy
    batch = torch.export.Dim("batch")
    program = torch.export.export(chain, (X[:2],), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(X), expected)


def test_the_waves_with_context_are_autograd() -> None:
    from treeprop_ray.core.objective import tree_objective
    from treeprop_ray.core.rule import Piece, Rule

    net = network("tuple")
    objective, _ = tree_objective(net, Rule(), X, Y, Piece(0, 0, 0, B, B))
    rate = 0.1
    objective.backward()
    expected = {
        name: p.detach() if p.grad is None else p.detach() - rate * p.grad
        for name, p in net.named_parameters()
    }
    net.zero_grad(set_to_none=True)
    words = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    trained(net, batch=B, epochs=1, lr=rate, **words)
    for name, p in net.named_parameters():  # a batch of all samples, in another order
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-4, atol=1e-6)


class Pair(nn.Module):
    """A stem of words and their sum; both go on along the chain, with or without a context."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tokens = kind, nn.Embedding(9, W)

    def forward(self, x: Tensor) -> Any:
        words = self.tokens(x)
        state: Any = {"words": words, "sum": words.sum(1), "size": words.mean((1, 2))}
        if self.kind == "dict":
            return state
        return tuple(state.values()), {"mask": x != 0}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.sum = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, state: Any, mask: Tensor | None = None) -> Any:
        words, sum_, size = state if mask is not None else map(state.get, ("words", "sum", "size"))
        words = words + self.words(words + sum_[:, None]).tanh() * size[:, None, None]
        sum_ = sum_ + self.sum(words if mask is None else words * mask[..., None]).tanh().mean(1)
        if mask is not None:
            return words, sum_, size + 1
        return {"size": size + 1, "words": words, "sum": sum_}  # in another order


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, 3)

    def forward(self, state: Any) -> Tensor:
        out: Tensor = self.linear(state["sum"] if isinstance(state, dict) else state[1])
        return out


def pairs(kind: str) -> TreeNetwork:
    torch.manual_seed(0)
    chain = [Both() for _ in range(3)]
    return TreeNetwork.from_blocks(Pair(kind), chain, Ends(), example=X[:2])


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_states_of_several_tensors_are_packed_on_both_engines(kind: str, local_ray: None) -> None:
    net = pairs(kind)
    here, there = (trained(n, **PACKED, **w) for n, w in ((net, {}), (pairs(kind), RAY)))
    assert all(torch.equal(here.weights[k], there.weights[k]) for k in here.weights)
    assert here.summary["final"] == there.summary["final"]
    start = dict(pairs(kind).named_parameters())
    for name, p in net.named_parameters():  # both tensors of a state have a gradient
        assert kind == "tuple" or not torch.equal(p, start[name]), name
    chain = net.chain().eval()
    with torch.no_grad():
        state, more = (net.stem.stem(X), {}) if kind == "dict" else net.stem.stem(X)
        for i in range(3):
            state = net.block((i, i + 1)).block(state, **more)
        expected = net.block(net.tree.head).head(state)
        assert torch.equal(chain(X), expected)
    program = torch.export.export(chain, (X[:2],), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.testing.assert_close(program.module()(X), expected)


class Named(Block):
    """As a layer that returns a dict."""

    def __init__(self, name: str = "hidden_states") -> None:
        super().__init__()
        self.name = name

    def forward(self, z: Tensor, mask: Tensor, scale: Tensor | None = None) -> Any:
        z, mean = super().forward(z, mask, scale)
        return {"mean": mean, self.name: z}


def test_a_dict_has_its_state_under_a_known_name(local_ray: None) -> None:
    def net(block: type[Block]) -> TreeNetwork:
        torch.manual_seed(0)
        return TreeNetwork.from_blocks(
            Stem("dict"), [block() for _ in range(3)], Head(), example=X[:2]
        )

    words = {**PACKED, "epochs": 1}
    expected = trained(net(Block), **words).weights
    for where in ({}, RAY):
        weights = trained(net(Named), **words, **where).weights
        assert all(torch.equal(weights[k], expected[k]) for k in expected)


def test_a_state_of_two_tensors_is_not_taken_for_one_with_a_context() -> None:
    class Cells(nn.LSTMCell):
        def forward(self, h: Any, c: Tensor | None = None) -> Any:
            return super().forward(h[0], h) if c is None else super().forward(h, (h, c))

    class Begin(nn.Module):
        def __init__(self, named: bool) -> None:
            super().__init__()
            self.named = named

        def forward(self, x: Tensor) -> Any:
            return ((x, x), None) if self.named else (x, x)

    class Last(nn.Linear):
        def forward(self, state: Any) -> Tensor:
            return super().forward(state[0])

    def build(named: bool) -> TreeNetwork:
        cells = [Cells(4, 4) for _ in range(3)]
        return TreeNetwork.from_blocks(Begin(named), cells, Last(4, 3), example=torch.zeros(2, 4))

    assert build(named=True).plain
    with pytest.raises(UserError, match=r"^block 1: returns two tensors like z_0 and the context"):
        build(named=False)


def test_states_that_cannot_be_packed_are_one_line() -> None:
    def build(stem: nn.Module, block: nn.Module) -> None:
        TreeNetwork.from_blocks(stem, [block], Ends(), example=X[:2], auxiliary=lambda l, r: block)

    class Given(nn.Module):
        def __init__(self, out: Any) -> None:
            super().__init__()
            self.out = out

        def forward(self, *_: Any) -> Any:
            return self.out

    z = torch.zeros(2, 3)
    for stem, block, says in (
        (Given({"a": z, "b": z.long()}), Given(z), "stem: a state holds tensors of floats.*int64"),
        (Given({"a": z, "b": z[:1]}), Given(z), "stem: the tensors of a state must have one row"),
        (Given({"a": z}), Given({"b": z}), r"block 1: gives .b: shape \(3,\)., must give a state"),
        (Given(z), Given({"a": z}), "block 1: returns a; the state must be named one of state"),
    ):
        with pytest.raises(UserError, match=f"^{says}") as caught:
            build(stem, block)
        assert "\n" not in str(caught.value)


class LlamaStem(nn.Module):
    """Tokens, rotary embeddings and a causal mask."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.tokens = nn.Embedding(9, config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        z_0, places = self.tokens(x), torch.arange(x.shape[1])[None]
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mask = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, -torch.inf)
        return z_0, {"position_embeddings": self.rotary(z_0, places), "attention_mask": mask}


def test_layers_of_llama_learn_masked_tokens_on_both_engines(local_ray: None) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
        num_hidden_layers=3, attn_implementation="eager",
    )  # fmt: skip
    labels = X.masked_fill(X == 0, -100)
    weights = []
    for more in ({}, {**RAY, **PACKED}):
        torch.manual_seed(0)
        layers = [LlamaDecoderLayer(config, i) for i in range(3)]
        net = TreeNetwork.from_blocks(LlamaStem(config), layers, nn.Linear(16, 9), example=X[:2])
        watch = Watch()
        treeprop_ray.fit(net, X, labels, callbacks=[watch], epochs=1, batch=16, **more)
        weights.append(watch.weights)
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


def test_misfits_are_one_line() -> None:
    shapes = [nn.Linear(5, 5), nn.Linear(5, 6), nn.Linear(6, 7)]
    says = r"^head: takes z_3 of shape \(2, 7\), but not z_2 of shape \(2, 6\)"
    with pytest.raises(UserError, match=says):
        TreeNetwork.from_blocks(
            None, shapes, nn.Linear(7, 3), example=torch.zeros(2, 5),
            auxiliary=lambda l, r: nn.Linear(5, 6),
        )  # fmt: skip

    class Three(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, x, x

    with pytest.raises(UserError, match=r"^stem: must return z_0 or \(z_0, context\), not tuple"):
        TreeNetwork.from_blocks(Three(), shapes, nn.Linear(7, 3), example=torch.zeros(2, 5))
    with pytest.raises(UserError, match=r"^method=cff: takes no stem that gives a context"):
        trained(network("dict"), method="cff")


def stages(**more: Any) -> TreeNetwork:
    """Convolutions whose maps get smaller and deeper, as in a ResNet."""
    torch.manual_seed(1)

    def stage(a: int, b: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.ReLU())

    blocks = [stage(3, 4, 1), stage(4, 6, 2), stage(6, 8, 2)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return TreeNetwork.from_blocks(
        None, blocks, head, example=torch.zeros(2, 3, 8, 8),
        auxiliary=lambda l, r: stage(3, 6, 2), **more,
    )  # fmt: skip


def test_exits_bring_short_paths_to_the_head_on_both_engines(local_ray: None) -> None:
    with pytest.raises(UserError, match=r"^head: takes z_3 of .* but not z_2 .*exits=.2: module"):
        stages()
    with pytest.raises(UserError, match=r"^exits=1: no short path ends at z_1"):
        stages(exits={1: nn.Conv2d(4, 8, 1)})
    gen = torch.Generator().manual_seed(6)
    x, y = torch.randn(32, 3, 8, 8, generator=gen), torch.arange(32) % 3
    weights = []
    for more in ({}, {**RAY, **PACKED}):
        torch.manual_seed(2)
        net, watch = stages(exits={2: nn.Conv2d(6, 8, 1)}), Watch()
        words = {"objective": "node_all_ce", "beta": 0.2, "epochs": 1, "batch": 8, **more}
        treeprop_ray.fit(net, x, y, validation=(x, y), callbacks=[watch], **words)
        weights.append(watch.weights)
        assert watch.summary["final"]["validation"].keys() == {"spine-1", "spine-2", "full"}
        assert net.path([0, 2, 4])(x).shape == (32, 3)
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert "3-4/exits.0.weight" in weights[0]
