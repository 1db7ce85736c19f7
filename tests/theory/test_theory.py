"""Claims of the theory, on a linear Gaussian chain where everything has a closed form."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Bernoulli, MultivariateNormal, Normal, kl_divergence

from treeprop_ray.core import factor
from treeprop_ray.core.boundary import Boundary
from treeprop_ray.core.node import TreeNode
from treeprop_ray.core.rng import normal_rows
from treeprop_ray.core.rule import Rule, cut
from treeprop_ray.core.tree import SPLITS, Tree
from treeprop_ray.theory import gaussian as theory
from treeprop_ray.theory.gaussian import Chain, Factor, Gaussian

torch.set_num_threads(1)
F64 = torch.float64
EVERY_N = range(2, 10)

every_tree = [Tree(N, split) for N in EVERY_N for split in SPLITS]
trees = pytest.mark.parametrize("tree", every_tree, ids=lambda t: f"{t.N}-{t.split}")


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def normal(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, dtype=F64)


def random_chain(N: int, seed: int = 0) -> tuple[Chain, Tensor, Tensor]:
    """A chain whose states have widths 2, 3, 4, 2, …, with parameters that want gradients."""
    gen = torch.Generator().manual_seed(100 * N + seed)
    widths = [2 + n % 3 for n in range(N + 1)]
    weights = [normal(gen, widths[n], widths[n - 1]) / 2 for n in range(1, N + 1)]
    biases = [normal(gen, widths[n]) for n in range(1, N + 1)]
    scales = (0.5 + torch.rand(N, generator=gen, dtype=F64)).tolist()
    chain = Chain(
        tuple(w.requires_grad_() for w in weights),
        tuple(b.requires_grad_() for b in biases),
        tuple(scales),
    )
    return chain, normal(gen, widths[0]), normal(gen, widths[-1])


def random_factors(chain: Chain, tree: Tree, seed: int) -> dict[int, Factor]:
    """Affine Gaussian factors with full covariances that know nothing about the chain."""
    gen = torch.Generator().manual_seed(seed)
    made = {}
    for n, node in tree.nodes.items():
        width = chain.width(n)
        root = normal(gen, width, width)
        made[n] = Factor(
            normal(gen, width, chain.width(node.l)) / 2,
            normal(gen, width, chain.width(node.r)) / 2,
            normal(gen, width),
            root @ root.mT + 0.1 * torch.eye(width, dtype=F64),
        )
    return made


def shifted(factors: dict[int, Factor], by: float) -> dict[int, Factor]:
    """The factors with every mean moved by the same amount."""
    return {n: dataclasses.replace(f, k=f.k + by) for n, f in factors.items()}


def gradient(loss: Tensor, chain: Chain) -> Tensor:
    """d(loss)/d(A_n, b_n) as one vector."""
    parts = torch.autograd.grad(loss, [*chain.weights, *chain.biases], retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


# -- Theorem 1: a chain's posterior is a tree -----------------------------------------------------


@pytest.mark.parametrize("N", EVERY_N)
def test_posterior_obeys_bayes_rule(N: int) -> None:
    """p(z | x, y) p(y | x) = p(z_1 | x) … p(y | z_{N-1}) at an arbitrary z."""
    chain, x, y = random_chain(N)
    gen = torch.Generator().manual_seed(1)
    z = [x, *(normal(gen, chain.width(n)) for n in range(1, N)), y]
    joint = sum(
        Normal(a @ z[n] + b, s).log_prob(z[n + 1]).sum()
        for n, (a, b, s) in enumerate(zip(chain.weights, chain.biases, chain.scales, strict=True))
    )
    p = theory.posterior(chain, x, y)
    given_y = MultivariateNormal(p.mean, p.cov).log_prob(torch.cat(z[1:-1]))
    close(given_y - theory.nll(chain, x, y), joint)


@pytest.mark.parametrize(("l", "n", "r"), [(0, 1, 2), (1, 2, 4), (0, 3, 5), (2, 4, 6)])
def test_bridge_obeys_the_local_identity(l: int, n: int, r: int) -> None:
    """p(z_n | z_l, z_r) p(z_r | z_l) = p(z_n | z_l) p(z_r | z_n)."""
    chain, _, _ = random_chain(6)
    gen = torch.Generator().manual_seed(2)
    z_l, z_n, z_r = (normal(gen, chain.width(i)) for i in (l, n, r))
    exact = theory.bridge(chain, l, n, r)

    def log_p(a: int, b: int, z_a: Tensor, z_b: Tensor) -> Tensor:
        return theory.log_density(theory.transition(chain, a, b).given(z_a), z_b)

    q = theory.log_density(Gaussian(exact.mean(z_l, z_r), exact.cov), z_n)
    close(q + log_p(l, r, z_l, z_r), log_p(l, n, z_l, z_n) + log_p(n, r, z_n, z_r))


@trees
def test_product_of_exact_tree_factors_is_the_posterior(tree: Tree) -> None:
    chain, x, y = random_chain(tree.N)
    exact = theory.posterior(chain, x, y)
    product = theory.tree_joint(tree, theory.exact_factors(chain, tree), x, y)
    close(product.mean, exact.mean)
    close(product.cov, exact.cov)


@trees
def test_one_wrong_factor_breaks_the_product(tree: Tree) -> None:
    chain, x, y = random_chain(tree.N)
    factors = theory.exact_factors(chain, tree)
    n = tree.N - 1
    factors[n] = dataclasses.replace(factors[n], cov=1.1 * factors[n].cov)
    exact = theory.posterior(chain, x, y)
    assert theory.kl(theory.tree_joint(tree, factors, x, y), exact) > 1e-3


@trees
def test_joint_of_factors_has_the_density_of_their_product(tree: Tree) -> None:
    chain, x, y = random_chain(tree.N)
    factors = random_factors(chain, tree, seed=3)
    gen = torch.Generator().manual_seed(4)
    z = [x, *(normal(gen, chain.width(n)) for n in tree.nodes), y]
    product = sum(
        MultivariateNormal(f.mean(z[node.l], z[node.r]), f.cov).log_prob(z[n])
        for n, (node, f) in enumerate(zip(tree.nodes.values(), factors.values(), strict=True), 1)
    )
    joint = theory.tree_joint(tree, factors, x, y)
    close(theory.log_density(joint, torch.cat(z[1:-1])), product)


# -- the bound F ----------------------------------------------------------------------------------


@trees
@pytest.mark.parametrize("seed", range(3))
def test_bound_exceeds_nll_by_the_divergence_from_the_posterior(tree: Tree, seed: int) -> None:
    chain, x, y = random_chain(tree.N, seed)
    factors = random_factors(chain, tree, seed)
    nll, F = theory.nll(chain, x, y), theory.bound(chain, tree, factors, x, y)
    q, p = theory.tree_joint(tree, factors, x, y), theory.posterior(chain, x, y)
    assert F - nll > 0.1
    close(F - nll, theory.kl(q, p), 1e-8)
    as_torch = kl_divergence(*(MultivariateNormal(g.mean, g.cov) for g in (q, p)))
    close(theory.kl(q, p), as_torch, 1e-8)


@trees
def test_bound_is_tight_at_the_exact_posterior_and_only_there(tree: Tree) -> None:
    chain, x, y = random_chain(tree.N)
    factors = theory.exact_factors(chain, tree)
    nll = theory.nll(chain, x, y)
    close(theory.bound(chain, tree, factors, x, y), nll, 1e-8)
    assert theory.bound(chain, tree, shifted(factors, 0.01), x, y) > nll + 1e-5


def test_bound_is_the_mean_of_sampled_log_ratios() -> None:
    """F in closed form against its definition: E_q[log q(z) - log p(z, y | x)], 40,000 draws."""
    tree = Tree(3)
    chain, x, y = random_chain(3)
    chain = chain.detach()
    factors = shifted(theory.exact_factors(chain, tree), 0.2)
    joint = theory.tree_joint(tree, factors, x, y)
    q = MultivariateNormal(joint.mean, joint.cov)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        z = q.sample((40_000,))
    hidden = list(z.split([chain.width(1), chain.width(2)], dim=1))
    states = [x.expand(len(z), -1), *hidden, y.expand(len(z), -1)]
    ratio = q.log_prob(z)
    for n, (a, b, s) in enumerate(zip(chain.weights, chain.biases, chain.scales, strict=True)):
        ratio = ratio - Normal(states[n] @ a.mT + b, s).log_prob(states[n + 1]).sum(1)
    error = ratio.std() / math.sqrt(len(z))
    assert abs(ratio.mean() - theory.bound(chain, tree, factors, x, y)) < 4 * error < 0.02


# -- the bias of the gradient ---------------------------------------------------------------------


@trees
def test_gradient_of_bound_is_that_of_nll_at_the_exact_posterior(tree: Tree) -> None:
    chain, x, y = random_chain(tree.N)
    true = gradient(theory.nll(chain, x, y), chain)
    fixed = theory.exact_factors(chain.detach(), tree)
    built = theory.exact_factors(chain, tree)
    close(gradient(theory.bound(chain, tree, fixed, x, y), chain), true, 1e-8)
    close(gradient(theory.bound(chain, tree, built, x, y), chain), true, 1e-8)


@trees
@pytest.mark.parametrize("held", [True, False], ids=["q-fixed", "q-built"])
def test_gradient_of_bound_is_biased_when_q_is_off(tree: Tree, held: bool) -> None:
    chain, x, y = random_chain(tree.N)
    true = gradient(theory.nll(chain, x, y), chain)
    source = chain.detach() if held else chain
    off = shifted(theory.exact_factors(source, tree), 0.5)
    bias = gradient(theory.bound(chain, tree, off, x, y), chain) - true
    assert bias.norm() > 0.01 * true.norm()


def test_bias_is_the_gradient_of_the_divergence() -> None:
    """F - nll = KL(q || p), so what F's gradient has too much is the gradient of the KL."""
    tree = Tree(5)
    chain, x, y = random_chain(5)
    off = shifted(theory.exact_factors(chain, tree), 0.5)
    divergence = theory.kl(theory.tree_joint(tree, off, x, y), theory.posterior(chain, x, y))
    nll, F = theory.nll(chain, x, y), theory.bound(chain, tree, off, x, y)
    close(gradient(F, chain) - gradient(nll, chain), gradient(divergence, chain), 1e-8)


def test_bias_of_a_fixed_q_vanishes_like_the_root_of_the_divergence() -> None:
    """The bound on the score term: bias <= S sqrt(2 KL), and the rate is reached."""
    tree = Tree(6)
    chain, x, y = random_chain(6)
    true = gradient(theory.nll(chain, x, y), chain)
    p = theory.posterior(chain, x, y)
    rates = []
    for by in (1e-2, 1e-3):
        off = shifted(theory.exact_factors(chain.detach(), tree), by)
        bias = gradient(theory.bound(chain, tree, off, x, y), chain) - true
        rates.append(bias.norm() / theory.kl(theory.tree_joint(tree, off, x, y), p).sqrt())
    assert rates[0] > 0.1
    torch.testing.assert_close(rates[0], rates[1], rtol=0.05, atol=0)


# -- half-step inversion: the node's own code against the exact bridge ----------------------------

WIDTH, BATCH = 4, 5
PIECE = cut(step=0, total=BATCH, pieces=1)[0]


def orthogonal_chain(N: int, variance: float) -> Chain:
    """N orthogonal blocks of one width with biases and equal noise."""
    gen = torch.Generator().manual_seed(N)
    weights = [torch.linalg.qr(normal(gen, WIDTH, WIDTH)).Q for _ in range(N)]
    biases = [normal(gen, WIDTH) for _ in range(N)]
    return Chain(tuple(weights), tuple(biases), (math.sqrt(variance),) * N)


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    block = nn.Linear(weight.shape[1], weight.shape[0], dtype=F64)
    block.load_state_dict({"weight": weight, "bias": bias})
    return block


def edge_block(chain: Chain, l: int, r: int) -> nn.Linear:
    """The block of an edge: the product of the chain's blocks along it."""
    across = theory.transition(chain, l, r)
    return linear(across.weight, across.bias)


def half_step(sigma: float, beta: float = 0.5) -> Rule:
    return Rule(correction="vjp", alpha=1, beta=beta, sigma=sigma)


def plain_run(block: nn.Module, z: Tensor, seed: int) -> Tensor:
    return block(z)


def tree_nodes(tree: Tree, chain: Chain, rule: Rule) -> dict[int, TreeNode]:
    made = {}
    for n, node in tree.nodes.items():
        right = None if tree.is_spine(node) else edge_block(chain, *node.right)
        left = edge_block(chain, *node.left)
        made[n] = TreeNode(tree, node, left, right, rule, False, plain_run)
    return made


def settle_tree(tree: Tree, chain: Chain, rule: Rule) -> dict[int, Tensor]:
    """Every z_n of a forward sweep by the engine's nodes, with a classifier as the head."""
    gen = torch.Generator().manual_seed(7)
    head = linear(normal(gen, 3, WIDTH), normal(gen, 3))
    boundary = Boundary(tree, nn.Identity(), head, rule, plain_run)
    labels = torch.randint(3, (BATCH,), generator=gen)
    z = {0: boundary.open(normal(gen, BATCH, WIDTH), labels, PIECE)}
    nodes = tree_nodes(tree, chain, rule)
    for level in range(1, tree.depth + 1):
        for place in tree.level(level):
            node = nodes[place.n]
            mu_fwd = node.lift(z[place.l], PIECE)
            if tree.is_spine(place):
                node.receive(boundary.answer(place.n, mu_fwd, PIECE), PIECE)
            else:
                node.answer(z[place.r], PIECE)
            z[place.n] = node.settle(PIECE)
    return z


def one_node_mean(
    left: nn.Linear, right: nn.Linear, z_l: Tensor, z_r: Tensor, rule: Rule
) -> Tensor:
    """mu of a node with these two blocks (node 1 of N = 4: inside the interval (0, 2))."""
    tree = Tree(4)
    node = TreeNode(tree, tree.nodes[1], left, right, rule, False, plain_run)
    node.lift(z_l, PIECE)
    node.answer(z_r, PIECE)
    return node.settle(PIECE)


def test_half_step_is_the_mean_of_the_forward_and_the_inverted_estimate() -> None:
    chain = orthogonal_chain(2, variance=0.7)
    gen = torch.Generator().manual_seed(8)
    z_l, z_r = normal(gen, BATCH, WIDTH), normal(gen, BATCH, WIDTH)
    (Q, R), (b, c) = chain.weights, chain.biases
    mu = one_node_mean(linear(Q, b), linear(R, c), z_l, z_r, half_step(sigma=0))
    close(mu, (z_l @ Q.mT + b + (z_r - c) @ R) / 2, 1e-12)
    close(mu, theory.bridge(chain, 0, 1, 2).mean(z_l, z_r), 1e-12)


@pytest.mark.parametrize(("stretch", "beta"), [(1.2, 0.5), (1.0, 0.4)])
def test_half_step_is_not_exact_without_isometry_or_another_step(
    stretch: float, beta: float
) -> None:
    chain = orthogonal_chain(2, variance=0.7)
    (Q, R), (b, c) = chain.weights, chain.biases
    chain = dataclasses.replace(chain, weights=(Q, stretch * R))
    gen = torch.Generator().manual_seed(8)
    z_l, z_r = normal(gen, BATCH, WIDTH), normal(gen, BATCH, WIDTH)
    rule = half_step(sigma=0, beta=beta)
    mu = one_node_mean(linear(Q, b), linear(stretch * R, c), z_l, z_r, rule)
    assert (mu - theory.bridge(chain, 0, 1, 2).mean(z_l, z_r)).abs().max() > 0.01


@pytest.mark.parametrize("N", [4, 8])
def test_inner_means_of_the_tree_are_exact_bridge_means(N: int) -> None:
    tree, chain = Tree(N), orthogonal_chain(N, variance=0.3)
    z = settle_tree(tree, chain, half_step(sigma=0))
    inner = [node for node in tree.nodes.values() if not tree.is_spine(node)]
    assert len(inner) == N - 1 - tree.depth
    for node in inner:
        exact = theory.bridge(chain, node.l, node.n, node.r)
        close(z[node.n], exact.mean(z[node.l], z[node.r]), 1e-12)


@pytest.mark.parametrize("N", [4, 8])
def test_inner_samples_of_the_tree_are_exact_bridge_samples(N: int) -> None:
    """With noise: z_n is the bridge's mean plus the bridge's own deviation times the draw."""
    sigma = 0.4
    tree, chain = Tree(N), orthogonal_chain(N, variance=2 * sigma**2)
    rule = half_step(sigma)
    z = settle_tree(tree, chain, rule)
    for node in tree.nodes.values():
        if tree.is_spine(node):
            continue
        exact = theory.bridge(chain, node.l, node.n, node.r)
        mean = exact.mean(z[node.l], z[node.r])
        eps = normal_rows(mean, PIECE.places, rule.seed, "noise", PIECE.step, node.n).to(F64)
        # the engine scales the float32 draw before it is added
        close(z[node.n], mean + eps @ torch.linalg.cholesky(exact.cov).mT, 1e-6)


@pytest.mark.parametrize("N", [2, 4, 8, 16])
def test_noise_of_a_level_is_the_bridge_variance_of_a_chain_with_twice_the_variance(N: int) -> None:
    sigma = 0.4
    tree, chain = Tree(N), orthogonal_chain(N, variance=2 * sigma**2)
    for n, node in tree_nodes(tree, chain, half_step(sigma)).items():
        place = tree.nodes[n]
        exact = theory.bridge(chain, place.l, n, place.r).cov
        assert node.sigma**2 == pytest.approx(sigma**2 * 2 ** (tree.depth - place.level), rel=1e-12)
        close(exact, node.sigma**2 * torch.eye(WIDTH, dtype=F64), 1e-12)


# -- divergences of single factors ----------------------------------------------------------------

reals = st.floats(-5, 5)
deviations = st.floats(0.05, 5)
probabilities = st.floats(1e-4, 1 - 1e-4)
saturated = probabilities | st.sampled_from([0.0, 1.0])


def rows(elements: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    """Two (2, 3) tensors of such elements."""
    flat = st.lists(elements, min_size=12, max_size=12)
    return flat.map(lambda v: tuple(torch.tensor(v, dtype=F64).view(2, 2, 3)))


few = settings(max_examples=60, deadline=None, derandomize=True)


@few
@given(means=rows(reals), sigma_q=deviations, sigma_p=deviations)
def test_kl_gaussian_is_that_of_torch(
    means: tuple[Tensor, Tensor], sigma_q: float, sigma_p: float
) -> None:
    mu_q, mu_p = means
    expected = kl_divergence(Normal(mu_q, sigma_q), Normal(mu_p, sigma_p))
    close(factor.kl_gaussian(mu_q, mu_p, sigma_q, sigma_p), expected, 1e-11)


@few
@given(means=rows(probabilities))
def test_kl_bernoulli_is_that_of_torch(means: tuple[Tensor, Tensor]) -> None:
    pi, rho = means
    close(factor.kl_bernoulli(pi, rho), kl_divergence(Bernoulli(pi), Bernoulli(rho)), 1e-11)


@few
@given(means=rows(reals), sigma_q=deviations, sigma_p=deviations)
def test_gaussian_divergence_is_the_kl_scaled_and_less_its_constant(
    means: tuple[Tensor, Tensor], sigma_q: float, sigma_p: float
) -> None:
    """sum KL = divergence / (2 sigma_p^2) + a constant of the two sigmas, the KL at equal means."""
    mu_q, mu_p = means
    exact = factor.kl_gaussian(mu_q, mu_p, sigma_q, sigma_p).sum()
    constant = factor.kl_gaussian(mu_q, mu_q, sigma_q, sigma_p).sum()
    close(exact, factor.divergence(mu_q, mu_p, "gaussian") / (2 * sigma_p**2) + constant, 1e-10)


def test_kl_of_the_half_step_factor_has_the_constant_of_the_paper() -> None:
    """q with half the variance of p: KL at equal means = (1/2 - 1 + log 2) / 2 per element."""
    zero = torch.zeros((), dtype=F64)
    at_equal_means = factor.kl_gaussian(zero, zero, math.sqrt(0.5) * 0.3, 0.3)
    assert float(at_equal_means) == pytest.approx((0.5 - 1 + math.log(2)) / 2, rel=1e-12)


@few
@given(means=rows(probabilities))
def test_bernoulli_divergence_is_the_kl_and_cross_entropy_less_entropy(
    means: tuple[Tensor, Tensor],
) -> None:
    pi, rho = means
    value = factor.divergence(pi, rho, "bernoulli")
    cross = nn.functional.binary_cross_entropy(rho, pi, reduction="sum")
    close(value, factor.kl_bernoulli(pi, rho).sum(), 1e-12)
    close(value, cross - Bernoulli(pi).entropy().sum(), 1e-10)


def check_slopes(mu_q: Tensor, mu_p: Tensor, family: str, scale: float) -> None:
    mu_q, mu_p = mu_q.clone().requires_grad_(), mu_p.clone().requires_grad_()
    value = scale * factor.divergence(mu_q, mu_p, family)
    slopes = torch.autograd.grad(value, (mu_q, mu_p))
    written = factor.divergence_slopes(mu_q.detach(), mu_p.detach(), family, scale)
    for by_hand, by_autograd in zip(written, (value.detach(), *slopes), strict=True):
        close(by_hand, by_autograd, 1e-12)


@few
@given(means=rows(reals), scale=st.floats(0.01, 2))
def test_gaussian_slopes_are_autograd(means: tuple[Tensor, Tensor], scale: float) -> None:
    check_slopes(*means, "gaussian", scale)


@few
@given(means=rows(saturated), scale=st.floats(0.01, 2))
def test_bernoulli_slopes_are_autograd_also_where_saturated(
    means: tuple[Tensor, Tensor], scale: float
) -> None:
    check_slopes(*means, "bernoulli", scale)


def test_chain_with_a_missing_bias_is_refused() -> None:
    one = torch.ones(1, 1, dtype=F64)
    with pytest.raises(ValueError, match=r"\(2, 1, 2\)"):
        Chain((one, one), (one[0],), (1.0, 1.0))
