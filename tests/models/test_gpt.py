"""GPT-2: transformers' numbers, causal, tied, with a head that works in chunks."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import engine_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from treeprop_ray import config, data
from treeprop_ray.core.network import STEM, TreeNetwork, count_parameters, edge_name
from treeprop_ray.core.objective import head_loss
from treeprop_ray.core.rule import Piece
from treeprop_ray.core.tree import Tree
from treeprop_ray.core.vision import v2  # noqa: F401  (before transformers, which imports torchvision)
from treeprop_ray.data import Shape
from treeprop_ray.inference.paths import score_network
from treeprop_ray.models import blueprint, gpt
from treeprop_ray.models.hf import state_of

TINY = ["experiment=text_small", "model.hidden=12", "model.heads=3", "data.length=9", "batch=4"]
BLOCKS = [["model.blocks=7"], ["model.blocks=6", "model.output_block=true", "split=right_full"]]


def network_of(words: list[str], V: int = 11, seed: int = 1) -> TreeNetwork:
    settings = config.load([*TINY, *words])
    plan = blueprint(settings, Shape((9,), V, torch.float64))
    return TreeNetwork.from_blueprint(plan, Tree(plan.N, settings.split), seed, torch.float64)


def roughen(network: TreeNetwork) -> None:
    """Large random weights everywhere, biases and norms too: nothing is at a special value."""
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in network.parameters():
            p.normal_(std=0.5, generator=gen)


def test_initial_weights_have_the_deviation_asked_for() -> None:
    """All random weights scale with it, auxiliary blocks too; the rest is ones and zeros."""
    gpt2, wide = (network_of([f"model.init_std={std}"]) for std in (0.02, 0.06))
    for (name, p), q in zip(gpt2.named_parameters(), wide.parameters(), strict=True):
        random = p.dim() > 1
        torch.testing.assert_close(q, 3 * p if random else p, msg=name)
    assert 0.04 < float(wide.stem.get_parameter("tokens.weight").std()) < 0.08


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("wikitext103_d4", 124_439_808),
        ("wikitext103_d5", 354_823_168),
        ("wikitext103_d6", 774_030_080),
    ],
)
def test_deployed_parameters_are_those_of_gpt2(name: str, parameters: int) -> None:
    settings = config.load([f"experiment={name}"])
    plan = blueprint(settings, Shape((1024,), 50257, torch.float32))
    tree = Tree(plan.N, settings.split)
    deployed = [STEM, *tree.path_edges(tree.chain)]
    assert sum(plan.count_parameters(edge_name(edge)) for edge in deployed) == parameters
    blocks = [len(p) - 2 + 1 for p in tree.named_paths.values()]  # the head holds a block
    assert blocks == [*range(2, tree.depth + 2), settings.model.blocks]


def test_the_depth_3_model_has_seven_blocks_and_a_bare_head() -> None:
    settings = config.load(["experiment=wikitext103_d3"])
    plan = blueprint(settings, Shape((1024,), 50257, torch.float32))
    assert plan.N == 8 and plan.count_parameters("7-8") == 2 * 768


@pytest.mark.parametrize("words", BLOCKS)
@pytest.mark.parametrize("path", ["full", "spine-2"])
def test_logits_equal_transformers_gpt2(words: list[str], path: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    network = network_of(words)
    roughen(network)
    settings = config.load([*TINY, *words])
    chain = network.path(network.tree.named_paths[path]).eval()
    about, state = state_of(chain, settings.model)
    theirs = GPT2LMHeadModel(GPT2Config(**about)).double().eval()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and all(k == "lm_head.weight" for k in missing)
    theirs.tie_weights()
    x = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(chain(x), theirs(x).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("words", BLOCKS)
def test_a_later_token_never_changes_an_earlier_logit(words: list[str]) -> None:
    network = network_of(words)
    roughen(network)
    x = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0))
    for path in network.tree.named_paths.values():
        chain = network.path(path).eval()
        with torch.no_grad():
            before = chain(x)
            for t in range(1, 9):
                other = x.clone()
                other[:, t:] = (other[:, t:] + 1) % 11
                after = chain(other)
                assert torch.equal(after[:, :t], before[:, :t])
                assert not torch.equal(after[:, t], before[:, t])


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("words", BLOCKS)
def test_chunked_head_loss_equals_the_plain_one(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value, gradients at the state, the norm and the table; no tensor of all logits exists."""
    B, T, V = 4, 9, 700
    network = network_of(words, V)
    roughen(network)
    head = network.block(network.tree.head)
    assert isinstance(head, gpt.Head)
    gen = torch.Generator().manual_seed(1)
    z = torch.randn(B, T, 12, generator=gen, dtype=torch.float64)
    y = torch.randint(0, V, (B, T), generator=gen)
    monkeypatch.setattr(gpt, "CHUNK", 5 * V)
    found = []
    for chunked in (True, False):
        network.zero_grad()
        leaf = z.clone().requires_grad_()
        with Largest() as largest:
            if chunked:
                loss = head_loss(head, leaf, y, Piece(0, 0, 0, B, B))
            else:
                loss = F.cross_entropy(head(leaf).flatten(0, 1), y.flatten())
            loss.backward()
        assert (largest.numel < B * T * V) == chunked
        grads = {k: p.grad for k, p in network.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), "z": leaf.grad, **grads})
    assert "stem.tokens.weight" in found[0] and found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(value, found[1][key], rtol=1e-9, atol=1e-12)
    assert head.count(z, y)[0] / (B * T) == pytest.approx(float(found[1]["loss"]), rel=1e-9)


def test_chunked_head_loss_in_bf16_is_close_to_float32() -> None:
    network = network_of(BLOCKS[0], 700).float()
    head = network.block(network.tree.head)
    gen = torch.Generator().manual_seed(1)
    z, y = torch.randn(4, 9, 12, generator=gen), torch.randint(0, 700, (4, 9), generator=gen)
    found = []
    for enabled in (True, False):
        network.zero_grad()
        leaf = z.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = head.loss_sum(leaf, y)  # type: ignore[operator]
        loss.backward()
        assert loss.dtype == leaf.grad.dtype == torch.float32  # type: ignore[union-attr]
        found.append((loss.detach(), leaf.grad, network.stem.tokens.weight.grad))  # type: ignore[union-attr]
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


def test_perplexity_of_a_uniform_model_is_the_vocabulary() -> None:
    """On every path; a model whose table is zero gives every token the same probability."""
    settings = config.load(TINY)
    samples = data.load(settings)
    plan = blueprint(settings, samples)
    network = TreeNetwork.from_blueprint(plan, Tree(plan.N), 1)
    with torch.no_grad():
        network.stem.tokens.weight.zero_()  # type: ignore[union-attr, operator]
    batches = [samples.scoring("test", i) for i in range(2)]
    scores = score_network(network, network.tree.named_paths, batches)
    assert set(scores) == {"spine-1", "spine-2", "spine-3", "full"}
    for score in scores.values():
        assert math.exp(score.loss) == pytest.approx(256, rel=1e-5)


def test_the_token_table_is_one_tensor_that_learns_from_both_ends() -> None:
    """One set of weights, in the stem; its gradient is the sum of those of stem and head."""
    settings = config.load([*TINY, "precision=float64", "sigma=0"])
    samples = data.load(settings)
    engine = engine_of(settings, samples, 10)
    engine.gradients(0)
    table = engine.host.parts["stem"].tokens.weight
    x, _ = engine.host.batches(0)
    unseen = torch.ones(256, dtype=torch.bool)
    unseen[x.unique()] = False
    assert table.grad is not None
    assert (table.grad[unseen].abs().sum(1) > 0).all()  # by the head's softmax
    names = [k for k in engine.state()[0] if "tokens" in k]
    assert names == ["stem/tokens.weight"]
    path = [engine.host.parts[name] for name in ("stem", "0-4", "7-8")]
    assert count_parameters(nn.Sequential(*path)) == (
        256 * 12 + 9 * 12 + 12 * 12 * 12 + 13 * 12 + 2 * 12
    )
