"""TreeProp's theory where every integral is known: a linear chain with Gaussian noise.

    z_n = A_n z_{n-1} + b_n + s_n * noise,   n = 1 … N,   z_0 = x and z_N = y are observed.

Here the posterior of the hidden states, the factors of the tree, the likelihood and the bound F
have closed forms, so what the method promises can be checked digit by digit. Nothing here trains.

    transition   p(z_r | z_l) across several steps        what an auxiliary block should learn
    bridge       p(z_n | z_l, z_r)                        what a tree node should infer
    posterior    p(z_1 … z_{N-1} | x, y)                  from the chain alone, without a tree
    tree_joint   the product of any affine Gaussian tree factors, as one Gaussian
    nll, bound   -log p(y | x), and F(q) >= -log p(y | x)

States are float64 vectors and may have different widths; everything is differentiable in A_n, b_n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from treeprop_ray.core.tree import Tree

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Chain:
    """The model: weights A_n, biases b_n and noise scales s_n, each listed for n = 1 … N."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = (len(self.weights), len(self.biases), len(self.scales))
        if len(set(counts)) > 1:
            raise ValueError(f"weights, biases, scales={counts}: need equally many of each")

    @property
    def N(self) -> int:
        """The number of steps."""
        return len(self.weights)

    def width(self, n: int) -> int:
        """The length of the vector z_n."""
        return self.weights[0].shape[1] if n == 0 else self.weights[n - 1].shape[0]

    def detach(self) -> Chain:
        """The same chain as a constant: what is built from it is held fixed in a gradient."""
        weights = tuple(a.detach() for a in self.weights)
        return Chain(weights, tuple(b.detach() for b in self.biases), self.scales)


@dataclass(frozen=True)
class Gaussian:
    """N(mean, cov)."""

    mean: Tensor
    cov: Tensor


@dataclass(frozen=True)
class Transition:
    """p(z_r | z_l) = N(weight z_l + bias, cov)."""

    weight: Tensor
    bias: Tensor
    cov: Tensor

    def then(self, nxt: Transition) -> Transition:
        """Two transitions in a row, the state between them integrated out."""
        return Transition(
            nxt.weight @ self.weight,
            nxt.weight @ self.bias + nxt.bias,
            nxt.weight @ self.cov @ nxt.weight.mT + nxt.cov,
        )

    def given(self, z_l: Tensor) -> Gaussian:
        """The Gaussian of z_r for a known z_l."""
        return Gaussian(self.weight @ z_l + self.bias, self.cov)


@dataclass(frozen=True)
class Factor:
    """An affine Gaussian tree factor q(z_n | z_l, z_r) = N(K_l z_l + K_r z_r + k, cov)."""

    K_l: Tensor
    K_r: Tensor
    k: Tensor
    cov: Tensor

    def mean(self, z_l: Tensor, z_r: Tensor) -> Tensor:
        """The mean for boundary states (…, width); leading dimensions are a batch."""
        return z_l @ self.K_l.mT + z_r @ self.K_r.mT + self.k


# -- the chain: transitions, likelihood, posterior ------------------------------------------------


def step(chain: Chain, n: int) -> Transition:
    """The model's own transition p(z_n | z_{n-1})."""
    weight, bias, scale = chain.weights[n - 1], chain.biases[n - 1], chain.scales[n - 1]
    return Transition(weight, bias, scale**2 * _eye(len(bias), weight))


def transition(chain: Chain, l: int, r: int) -> Transition:
    """p(z_r | z_l) for l < r: blocks multiply, noise adds up on the way."""
    return reduce(Transition.then, (step(chain, n) for n in range(l + 1, r + 1)))


def nll(chain: Chain, x: Tensor, y: Tensor) -> Tensor:
    """-log p(y | x): the loss of the deployed chain, all hidden states integrated out."""
    return -log_density(transition(chain, 0, chain.N).given(x), y)


def posterior(chain: Chain, x: Tensor, y: Tensor) -> Gaussian:
    """The exact p(z_1 … z_{N-1} | x, y), stacked in the order of n.

    Deliberately without the tree: the joint Gaussian of z_1 … z_N given x, whose covariances are
    Cov(z_m, z_n) = Cov(z_m) A_{m→n}^T for m < n, conditioned on z_N = y.
    """
    N = chain.N
    ahead = [transition(chain, 0, n).given(x) for n in range(1, N + 1)]

    def covariance(m: int, n: int) -> Tensor:
        if m > n:
            return covariance(n, m).mT
        at_m = ahead[m - 1].cov
        return at_m if m == n else at_m @ transition(chain, m, n).weight.mT

    hidden = range(1, N)
    mean = torch.cat([g.mean for g in ahead[:-1]])
    cov = torch.cat([torch.cat([covariance(m, n) for n in hidden], dim=1) for m in hidden])
    cross = torch.cat([covariance(m, N) for m in hidden])
    gain = torch.linalg.solve(ahead[-1].cov, cross.mT).mT
    return Gaussian(mean + gain @ (y - ahead[-1].mean), cov - gain @ cross.mT)


# -- the tree: exact factors and the product of any factors ---------------------------------------


def bridge(chain: Chain, l: int, n: int, r: int) -> Factor:
    """The exact p(z_n | z_l, z_r), by Bayes' rule with prior p(z_n | z_l), likelihood p(z_r | z_n).

    Precisions add: P = C_ln^-1 + A_nr^T C_nr^-1 A_nr. The mean weighs the forward estimate from z_l
    against the evidence that z_r gives about z_n. With orthogonal blocks and as much noise on the
    left as on the right both weigh one half: the half-step rule, alpha = 1 and beta = 0.5.
    """
    left, right = transition(chain, l, n), transition(chain, n, r)
    prior = torch.linalg.inv(left.cov)
    evidence = torch.linalg.solve(right.cov, right.weight).mT  # A_nr^T C_nr^-1
    cov = torch.linalg.inv(prior + evidence @ right.weight)
    return Factor(
        K_l=cov @ prior @ left.weight,
        K_r=cov @ evidence,
        k=cov @ (prior @ left.bias - evidence @ right.bias),
        cov=cov,
    )


def exact_factors(chain: Chain, tree: Tree) -> dict[int, Factor]:
    """The bridge of every node: by Theorem 1 their product is the exact posterior."""
    return {n: bridge(chain, node.l, n, node.r) for n, node in tree.nodes.items()}


def tree_joint(tree: Tree, factors: Mapping[int, Factor], x: Tensor, y: Tensor) -> Gaussian:
    """The product of the tree's factors as one Gaussian over z_1 … z_{N-1}, in the order of n.

    Every factor says z_n - K_l z_l - K_r z_r = k + noise. Together these are a linear system
    E z = k + noise, triangular in tree order, hence mean E^-1 k and covariance E^-1 C E^-T.
    """
    picks, fixed = _states([len(factors[n].k) for n in tree.nodes], x, y)
    rows, offsets = [], []
    for n, node in tree.nodes.items():
        f = factors[n]
        rows.append(picks[n] - f.K_l @ picks[node.l] - f.K_r @ picks[node.r])
        offsets.append(f.mean(fixed[node.l], fixed[node.r]))
    inverse = torch.linalg.inv(torch.cat(rows))
    spread = {n: inverse @ picks[n].mT for n in tree.nodes}  # what the noise of z_n moves
    cov = torch.stack([spread[n] @ factors[n].cov @ spread[n].mT for n in tree.nodes]).sum(0)
    return Gaussian(inverse @ torch.cat(offsets), cov)


def bound(chain: Chain, tree: Tree, factors: Mapping[int, Factor], x: Tensor, y: Tensor) -> Tensor:
    """The variational objective F(q) of a tree-factored q, term by term as it is defined.

    F = E_q[sum_{n<N} (log q(z_n | z_l, z_r) - log p(z_n | z_{n-1})) - log p(y | z_{N-1})].
    It uses neither the posterior nor the likelihood, so F - nll = KL(q || posterior) is a claim
    that a test can refute.
    """
    q = tree_joint(tree, factors, x, y)
    picks, fixed = _states([chain.width(n) for n in tree.nodes], x, y)
    total = -torch.stack([entropy(factors[n].cov) for n in tree.nodes]).sum()
    for n in range(1, chain.N + 1):
        weight, bias, scale = chain.weights[n - 1], chain.biases[n - 1], chain.scales[n - 1]
        # z_n - A_n z_{n-1} - b_n = pick z + rest, with z the stacked hidden states
        pick = picks[n] - weight @ picks[n - 1]
        rest = fixed[n] - weight @ fixed[n - 1] - bias
        square = ((pick @ q.mean + rest) ** 2).sum() + (pick @ q.cov * pick).sum()
        total = total + 0.5 * square / scale**2 + len(bias) * (math.log(scale) + 0.5 * LOG_2PI)
    return total


# -- Gaussians -------------------------------------------------------------------------------------


def log_density(p: Gaussian, z: Tensor) -> Tensor:
    """log N(z | mean, cov)."""
    error = z - p.mean
    square: Tensor = error @ torch.linalg.solve(p.cov, error)
    return -0.5 * (square + torch.logdet(p.cov) + len(z) * LOG_2PI)


def entropy(cov: Tensor) -> Tensor:
    """-E[log N(z | m, cov)], whatever the mean m."""
    return 0.5 * (torch.logdet(cov) + len(cov) * (1 + LOG_2PI))


def kl(q: Gaussian, p: Gaussian) -> Tensor:
    """KL(q || p)."""
    error = p.mean - q.mean
    spread: Tensor = torch.linalg.solve(p.cov, q.cov).trace() - len(error)
    square: Tensor = error @ torch.linalg.solve(p.cov, error)
    return 0.5 * (spread + square + torch.logdet(p.cov) - torch.logdet(q.cov))


def _eye(width: int, like: Tensor) -> Tensor:
    return torch.eye(width, dtype=like.dtype)


def _states(widths: Sequence[int], x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Every state z_0 … z_N as picks[n] z + fixed[n], with z the stacked hidden states.

    The observed ends pick nothing and are fixed; hidden states are picked and have no fixed part.
    """
    hidden = torch.split(_eye(sum(widths), x), list(widths))
    ends = [x.new_zeros(len(end), sum(widths)) for end in (x, y)]
    return [ends[0], *hidden, ends[1]], [x, *(x.new_zeros(w) for w in widths), y]
