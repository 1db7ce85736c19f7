"""The claim everything rests on: adjoint waves give the gradients of one autograd backward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import local_engine, tiny_batches, tiny_network
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import tree_loss

from treeprop_ray.core.network import TreeNetwork
from treeprop_ray.core.objective import tree_objective
from treeprop_ray.core.optim_rule import OptimizerRule
from treeprop_ray.core.rng import normal_rows
from treeprop_ray.core.rule import Piece, Rule


def rules(family: str) -> st.SearchStrategy[Rule]:
    beta = st.sampled_from([0.0, 0.5, 1.0])
    weight = st.sampled_from([0.0, 0.7, 1.0])
    common = {
        "family": st.just(family),
        "objective": st.sampled_from(["final_ce", "node", "node_all_ce"]),
        "correction": st.sampled_from(["mean", "vjp", "normalised", "clipped"]),
        "input": st.sampled_from(["mean", "sample"]),
        "ce_at": st.sampled_from(["mean", "sample"]),
        "levels": st.sampled_from(["all", "finest"]),
        "labels_per_sample": st.sampled_from([1, 2]),
        "correction_scale": st.sampled_from([1.0, 0.3]),
        "target_gradient": st.booleans(),
        "detach_levels": st.booleans(),
        "own": weight,
        "right": weight,
        "ce": st.sampled_from([0.9, 1.0]),
    }
    if family == "bernoulli":
        common["reduction"] = st.sampled_from(["mean", "sigma"])
        ours = beta.flatmap(
            lambda b: st.builds(Rule, alpha=st.just(1 - b), beta=st.just(b), **common)
        )
        literal = st.builds(
            Rule,
            alpha=st.sampled_from([0.5, 1.0]),
            beta=beta,
            bernoulli=st.just("literal"),
            **common,
        )
        return ours | literal
    noise = st.sampled_from([(0.0, "mean"), (0.1, "mean"), (0.1, "sigma")])
    return noise.flatmap(lambda pair: gaussian_rules(beta, *pair, common))


def gaussian_rules(
    beta: st.SearchStrategy[float], sigma: float, reduction: str, common: dict[str, Any]
) -> st.SearchStrategy[Rule]:
    return st.builds(
        Rule,
        alpha=st.sampled_from([0.0, 0.6, 1.0]),
        beta=beta,
        sigma=st.just(sigma),
        reduction=st.just(reduction),
        noise_schedule=st.sampled_from(["depth", "flat"]),
        mc_samples=st.sampled_from([1, 2]),
        **common,
    )


def wave_gradients(network: TreeNetwork, rule: Rule, pieces: int = 1) -> dict[str, torch.Tensor]:
    network.zero_grad()
    local_engine(network, rule, OptimizerRule(), tiny_batches(), pieces).gradients(0)
    return gradients(network)


def autograd_gradients(network: TreeNetwork, rule: Rule) -> dict[str, torch.Tensor]:
    network.zero_grad()
    x, y = tiny_batches()(0)
    x, y = torch.cat([x] * rule.mc_samples), torch.cat([y] * rule.mc_samples)
    objective, _ = tree_objective(network, rule, x, y, Piece(0, 0, 0, len(x), len(x)))
    objective.backward()
    return gradients(network)


def gradients(network: TreeNetwork) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in network.named_parameters()
    }


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("split", ["floor", "right_full"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_adjoint_waves_equal_autograd(family: str, split: str, data: st.DataObject) -> None:
    N = data.draw(st.integers(2, 40), label="N")
    rule = data.draw(rules(family), label="rule")
    stem = data.draw(st.booleans(), label="stem has parameters")
    network = tiny_network(N, split, family, stem)
    expected = autograd_gradients(network, rule)
    pieces = data.draw(st.sampled_from([1, 2, 5]), label="microbatches")
    for name, gradient in wave_gradients(network, rule, pieces).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("objective", ["node", "node_all_ce"])
def test_every_block_learns(objective: str) -> None:
    """The comparison above is not one of zeros with zeros."""
    rule = Rule(objective=objective, alpha=0.6, beta=0.5)
    for name, gradient in wave_gradients(tiny_network(13), rule).items():
        assert gradient.abs().max() > 1e-12, name


def test_final_ce_trains_only_the_spine() -> None:
    found = wave_gradients(tiny_network(8), Rule(objective="final_ce"))
    trained = {name.split(".")[1] for name, g in found.items() if "edges" in name and g.any()}
    assert trained == {"0-4", "4-6", "6-7", "7-8"}


def test_detached_levels_get_no_gradient_from_deeper_ones() -> None:
    """With all levels detached, the root's left block learns from its own terms alone."""
    network = tiny_network(8, stem=False)
    own_terms = Rule(objective="node", detach_levels=True)
    assert not wave_gradients(network, own_terms)["edges.0-4.linear.weight"].any()
    whole = Rule(objective="node", detach_levels=False)
    assert wave_gradients(network, whole)["edges.0-4.linear.weight"].any()


def test_microbatches_give_the_gradients_of_the_whole_batch_with_noise() -> None:
    rule = Rule(alpha=1.0, beta=0.5, sigma=0.2, objective="node_all_ce")
    network = tiny_network(8)
    whole = wave_gradients(network, rule)
    for name, gradient in wave_gradients(network, rule, pieces=4).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-13)


def test_backpropagation_engine_equals_autograd_on_the_chain() -> None:
    network = tiny_network(8)
    local_engine(network, Rule(), OptimizerRule(), tiny_batches(), 3, method="bp").gradients(0)
    found = gradients(network)
    network.zero_grad()
    x, y = tiny_batches()(0)
    torch.nn.functional.cross_entropy(network.chain()(x), y).backward()
    for name, gradient in gradients(network).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)


def test_monte_carlo_samples_average_the_objective() -> None:
    """K samples draw different noise and their mean is an estimate of the same objective."""
    network = tiny_network(5)
    rule = Rule(alpha=1.0, beta=0.0, sigma=0.3, mc_samples=64, objective="node_all_ce")
    many = wave_gradients(network, rule)
    one = wave_gradients(network, replace(rule, mc_samples=1))
    still = wave_gradients(network, replace(rule, mc_samples=1, sigma=0.0))
    name = "edges.0-2.linear.weight"
    assert (many[name] - one[name]).abs().max() > 1e-6
    assert (many[name] - still[name]).norm() < (one[name] - still[name]).norm()


def reference_gradients(network: TreeNetwork, rule: Rule) -> dict[str, torch.Tensor]:
    network.zero_grad()
    x, y = tiny_batches()(0)
    x, y = torch.cat([x] * rule.mc_samples), torch.cat([y] * rule.mc_samples)

    def draw(like: torch.Tensor, n: int) -> torch.Tensor:
        return normal_rows(like, range(len(like)), rule.seed, "noise", 0, n)

    tree_loss(network, vars(rule), x, y, draw).backward()
    return gradients(network)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("split", ["floor", "right_full"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_adjoint_waves_equal_the_formulas(family: str, split: str, data: st.DataObject) -> None:
    """An oracle that shares nothing with the code under test (reference.py)."""
    N = data.draw(st.integers(2, 24), label="N")
    rule = data.draw(rules(family), label="rule")
    network = tiny_network(N, split, family)
    expected = reference_gradients(network, rule)
    for name, grad in wave_gradients(network, rule, data.draw(st.integers(1, 3))).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)
