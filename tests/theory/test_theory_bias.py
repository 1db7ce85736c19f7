"""The bias of the update on a linear Gaussian chain: exact, bounded, and zero at the posterior."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from test_theory import random_chain, shifted

from treeprop_ray.core.tree import Tree
from treeprop_ray.theory import gaussian as theory
from treeprop_ray.theory.bias import TreePosterior, _score, bias_of, gradient

F64 = torch.float64


@pytest.mark.parametrize("split", ["floor", "right_full"])
@pytest.mark.parametrize("N", [2, 3, 5, 8])
def test_exact_posterior_has_cosine_one_and_no_bias(N: int, split: str) -> None:
    chain, x, y = random_chain(N)
    tree = Tree(N, split)
    found = bias_of(chain, tree, theory.exact_factors(chain, tree), x, y)
    assert found.cosine == pytest.approx(1, abs=1e-9)
    assert found.bias < 1e-7 * found.g and found.bound < 1e-3 * found.g
    off = bias_of(chain, tree, shifted(theory.exact_factors(chain, tree), 0.5), x, y)
    assert off.bias > 0.01 * off.g


@pytest.mark.parametrize("N", [2, 3, 6])
def test_exact_posterior_is_a_tree_posterior_with_the_kalman_gain(N: int) -> None:
    """So training can reach it: b_score = b_path = 0 there, in the method's own parametrization."""
    chain, x, y = random_chain(N)
    tree = Tree(N)
    q = TreePosterior(chain, tree)
    with torch.no_grad():
        for edge in tree.edges:
            if edge[1] - edge[0] > 1:
                across = theory.transition(chain, *edge)
                q.weights[f"{edge[0]}-{edge[1]}"].copy_(across.weight)
                q.biases[f"{edge[0]}-{edge[1]}"].copy_(across.bias)
        for n, exact in theory.exact_factors(chain, tree).items():
            q.gains[str(n)].copy_(exact.K_r)
            q.roots[str(n)].copy_(torch.linalg.cholesky(exact.cov))
    found = bias_of(chain, tree, q.factors(chain), x, y)
    assert max(found.score, found.path) < 1e-6 * found.g
    assert found.kl == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("N", [2, 4, 5])
def test_bounds_hold_for_factors_that_know_nothing(N: int, seed: int) -> None:
    chain, x, y = random_chain(N, seed)
    tree = Tree(N)
    found = bias_of(chain, tree, TreePosterior(chain, tree, seed).factors(chain), x, y)
    assert 0 < found.score <= found.score_bound
    assert 0 < found.path <= found.path_bound
    assert found.bias <= found.score + found.path


def test_score_term_is_the_difference_of_expected_scores() -> None:
    """b_score from gradients of F and nll against E_p[s] - E_q[s] from Gaussian moments."""
    chain, x, y = random_chain(4)
    tree = Tree(4)
    factors = shifted(theory.exact_factors(chain.detach(), tree), 0.3)
    fixed_q = gradient(theory.bound(chain, tree, factors, x, y), chain)
    b_score = fixed_q - gradient(theory.nll(chain, x, y), chain)
    q, p = theory.tree_joint(tree, factors, x, y), theory.posterior(chain.detach(), x, y)
    parts = [
        _score(chain.detach(), n, p, x, y)[0] - _score(chain.detach(), n, q, x, y)[0]
        for n in range(1, 5)
    ]
    expected = torch.cat([d[:, :-1].flatten() for d in parts] + [d[:, -1] for d in parts])
    torch.testing.assert_close(b_score, expected, rtol=1e-8, atol=1e-9)


def test_second_moment_of_the_score_is_that_of_samples() -> None:
    chain, x, y = random_chain(3)
    chain = chain.detach()
    p = theory.posterior(chain, x, y)
    gen = torch.Generator().manual_seed(0)
    noise = torch.randn(50_000, len(p.mean), generator=gen, dtype=F64)
    z = p.mean + noise @ torch.linalg.cholesky(p.cov).mT
    z_1, z_2 = z.split([chain.width(1), chain.width(2)], dim=1)
    e = (z_2 - z_1 @ chain.weights[1].mT - chain.biases[1]) / chain.scales[1] ** 2
    sampled = ((e**2).sum(1) * ((z_1**2).sum(1) + 1)).mean()
    assert _score(chain, 2, p, x, y)[1] == pytest.approx(float(sampled), rel=0.03)


def test_bias_falls_with_the_divergence_along_a_training_run() -> None:
    """The example's own run, shortened: bounds hold at every step."""
    path = Path(__file__).parent.parent.parent / "examples" / "bias_bound.py"
    spec = importlib.util.spec_from_file_location("bias_bound", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rows = example.train(steps=60, every=20)
    assert all(row["bounds_hold"] for row in rows)
    assert rows[-1]["kl"] < 0.1 * rows[0]["kl"]
    assert rows[-1]["bias"] < 0.2 * rows[0]["bias"]
    assert rows[-1]["cosine"] > rows[0]["cosine"] > 0
