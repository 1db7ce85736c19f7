"""The bias of the TreeProp update on a linear Gaussian chain, exactly, and the bounds on it.

    g      = grad nll                            the true gradient in the chain's weights and biases
    g_hat  = grad F, feedback held constant      the update
    b      = g_hat - g = b_score + b_path
    b_score = E_p[s] - E_q[s]                    s(z) = grad log p(z, y | x), p the exact posterior
    b_path  = Cov_q(S_q, r)                      S_q = grad log q(z), r = log q(z) / p(z)

Bounds (paper, appendix on the gradient bias):

    |b_path|  <= G_q sqrt(Var_q r),                     G_q^2 = E_q |S_q|^2
    |b_score| <= sqrt(sum_n S_n^2 2 KL(q_n || p_n))     q_n, p_n: marginals on (z_{n-1}, z_n)

The paper's S_n is a supremum of the score, which is infinite for Gaussian states. Here it is
S_n^2 = E_p |s_n - c|^2 + E_q |s_n - c|^2 for a constant c. The bound holds with it: by
Cauchy-Schwarz |int (s - c)(p - q)|^2 <= int |s - c|^2 (p + q) * int (p - q)^2 / (p + q), and the
last integral is at most 2 int (sqrt p - sqrt q)^2 <= 2 KL(q || p).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treeprop_ray.core.tree import Edge, Tree
from treeprop_ray.theory import gaussian as theory
from treeprop_ray.theory.gaussian import Chain, Factor, Gaussian


@dataclass(frozen=True)
class Bias:
    """Norms of the gradients and biases of one pair (x, y), and the bounds."""

    g: float
    g_hat: float
    cosine: float
    bias: float
    score: float
    score_bound: float
    path: float
    path_bound: float
    kl: float

    @property
    def bound(self) -> float:
        """The bound on |b|."""
        return self.score_bound + self.path_bound


class TreePosterior(nn.Module):
    """q of the method with every part that is not the chain's own free to be learned.

    A factor has the mean mu_fwd + K (z_r - f_right(mu_fwd)), mu_fwd = f_left(z_l), and a covariance
    of its own.
    Edges of length 1 are the chain's blocks, longer ones have weights of their own. In the feedback
    the chain is held constant, as the correction of the method is. The exact posterior is of this
    form: K is then the Kalman gain.
    """

    def __init__(self, chain: Chain, tree: Tree, seed: int = 0) -> None:
        super().__init__()
        self.tree = tree
        gen = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=gen, dtype=torch.float64) / 2)

        width = chain.width
        long = [e for e in tree.edges if e[1] - e[0] > 1]
        self.weights = nn.ParameterDict({_name(e): normal(width(e[1]), width(e[0])) for e in long})
        self.biases = nn.ParameterDict({_name(e): normal(width(e[1])) for e in long})
        self.gains = nn.ParameterDict(
            {str(n): normal(width(n), width(node.r)) for n, node in tree.nodes.items()}
        )
        self.roots = nn.ParameterDict(
            {str(n): nn.Parameter(torch.eye(width(n), dtype=torch.float64)) for n in tree.nodes}
        )

    def block(self, chain: Chain, edge: Edge) -> tuple[Tensor, Tensor]:
        """Weight and bias of an edge."""
        if edge[1] - edge[0] == 1:
            return chain.weights[edge[0]], chain.biases[edge[0]]
        return self.weights[_name(edge)], self.biases[_name(edge)]

    def factors(self, chain: Chain) -> dict[int, Factor]:
        """The tree factors; differentiable in the chain along mu_fwd only."""
        made = {}
        for n, node in self.tree.nodes.items():
            A, a = self.block(chain, node.left)
            A_, a_ = self.block(chain.detach(), node.left)
            B, b = self.block(chain.detach(), node.right)
            K, root = self.gains[str(n)], self.roots[str(n)]
            made[n] = Factor(A - K @ B @ A_, K, a - K @ (B @ a_ + b), root @ root.mT)
        return made


def gradient(loss: Tensor, chain: Chain) -> Tensor:
    """d(loss)/d(weights, biases of the chain) as one vector."""
    parts = torch.autograd.grad(
        loss, [*chain.weights, *chain.biases], retain_graph=True, allow_unused=True
    )
    zipped = zip(parts, [*chain.weights, *chain.biases], strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zipped])


def bias_of(chain: Chain, tree: Tree, factors: Mapping[int, Factor], x: Tensor, y: Tensor) -> Bias:
    """Exact bias and bounds; `factors` carry the graph of q's dependence on the chain."""
    fixed = {
        n: Factor(*(t.detach() for t in (f.K_l, f.K_r, f.k, f.cov))) for n, f in factors.items()
    }
    g = gradient(theory.nll(chain, x, y), chain)
    g_hat = gradient(theory.bound(chain, tree, factors, x, y), chain)
    held = gradient(theory.bound(chain, tree, fixed, x, y), chain)
    frozen = chain.detach()
    q, p = theory.tree_joint(tree, fixed, x, y), theory.posterior(frozen, x, y)
    return Bias(
        g=float(g.norm()),
        g_hat=float(g_hat.norm()),
        cosine=float(torch.dot(g, g_hat) / (g.norm() * g_hat.norm())),
        bias=float((g_hat - g).norm()),
        score=float((held - g).norm()),
        score_bound=score_bound(frozen, q, p, x, y),
        path=float((g_hat - held).norm()),
        path_bound=path_bound(frozen, tree, fixed, q, p, x, y),
        kl=float(theory.kl(q, p)),
    )


def score_bound(chain: Chain, q: Gaussian, p: Gaussian, x: Tensor, y: Tensor) -> float:
    """The bound on the score term from the marginals on (z_{n-1}, z_n)."""
    total = 0.0
    for n in range(1, chain.N + 1):
        (mean_q, square_q), (mean_p, square_p) = (_score(chain, n, d, x, y) for d in (q, p))
        c = (mean_q + mean_p) / 2
        spread = sum(
            square - 2 * float((c * mean).sum()) + float((c**2).sum())
            for mean, square in ((mean_q, square_q), (mean_p, square_p))
        )
        places = _hidden(chain, n)
        kl = float(theory.kl(_marginal(q, places), _marginal(p, places)))
        total += spread * 2 * max(0.0, kl)  # rounding makes it negative at q = p
    return math.sqrt(total)


def path_bound(
    chain: Chain,
    tree: Tree,
    factors: Mapping[int, Factor],
    q: Gaussian,
    p: Gaussian,
    x: Tensor,
    y: Tensor,
) -> float:
    """The bound on the path term: G_q sqrt(Var_q r).

    S_q is C^-1 (z_n - mean_n) (z_l, 1)^T for every node whose left block is the chain's, and
    z_n - mean_n is independent of z_l. r is quadratic in z, so its variance has a closed form.
    """
    square = 0.0
    for n, node in tree.nodes.items():
        if node.l == n - 1:
            z_l = _state(chain, node.l, q, x, y)
            size = float((z_l.mean**2).sum() + z_l.cov.trace()) + 1
            square += float(torch.linalg.inv(factors[n].cov).trace()) * size
    inverse = torch.linalg.inv(p.cov)
    bend = (inverse - torch.linalg.inv(q.cov)) / 2 @ q.cov
    slope = inverse @ (q.mean - p.mean)
    variance = float(2 * (bend @ bend).trace() + slope @ q.cov @ slope)
    return math.sqrt(square * max(0.0, variance))


# -- moments under a Gaussian over the stacked hidden states --------------------------------------


def _score(chain: Chain, n: int, d: Gaussian, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """E[s_n] and E|s_n|^2 with s_n = e (z_{n-1}, 1)^T / s^2, e = z_n - A z_{n-1} - b."""
    picks, fixed = theory._states([chain.width(i) for i in range(1, chain.N)], x, y)
    weight, bias, scale = chain.weights[n - 1], chain.biases[n - 1], chain.scales[n - 1]
    pick_e = picks[n] - weight @ picks[n - 1]
    e = pick_e @ d.mean + fixed[n] - weight @ fixed[n - 1] - bias
    u = picks[n - 1] @ d.mean + fixed[n - 1]
    C_ee, C_uu = pick_e @ d.cov @ pick_e.mT, picks[n - 1] @ d.cov @ picks[n - 1].mT
    C_eu = pick_e @ d.cov @ picks[n - 1].mT
    mean = torch.cat([C_eu + e[:, None] * u[None], e[:, None]], 1) / scale**2
    size_e, size_u = (e**2).sum() + C_ee.trace(), (u**2).sum() + C_uu.trace() + 1
    square = size_e * size_u + 2 * (C_eu**2).sum() + 4 * (e @ C_eu @ u)
    return mean, float(square) / scale**4


def _hidden(chain: Chain, n: int) -> list[int]:
    """Places of z_{n-1} and z_n in the stacked hidden states, as far as they are hidden."""
    starts = [0]
    for i in range(1, chain.N):
        starts.append(starts[-1] + chain.width(i))
    return [j for i in (n - 1, n) if 0 < i < chain.N for j in range(starts[i - 1], starts[i])]


def _marginal(d: Gaussian, places: list[int]) -> Gaussian:
    return Gaussian(d.mean[places], d.cov[places][:, places])


def _state(chain: Chain, n: int, d: Gaussian, x: Tensor, y: Tensor) -> Gaussian:
    picks, fixed = theory._states([chain.width(i) for i in range(1, chain.N)], x, y)
    return Gaussian(picks[n] @ d.mean + fixed[n], picks[n] @ d.cov @ picks[n].mT)


def _name(edge: Edge) -> str:
    return f"{edge[0]}-{edge[1]}"
